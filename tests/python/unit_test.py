#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The parts of the Python client that need no server."""

import asyncio
import inspect
import io
import sys
import time
import typing
import unittest

import support  # noqa: F401: first
import grpc
from google.protobuf import descriptor_pb2, descriptor_pool

import denoised
from denoised import _convert, notebook, types
from denoised._connection import _parse_target
from denoised._stream import StreamState
from denoised.errors import make_error
from denoised.retry import Attempts, RetryBudget, RetryPolicy
from denoised.rpc import error_details_pb2, status_pb2
from denoised.v1 import image_generation_pb2 as pb


def unavailable(**fields):
    return denoised.Unavailable("gone", **fields)


class ErrorsTest(unittest.TestCase):
    def test_details(self):
        status = status_pb2.Status()
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field="params.steps", description="is 0; use at least 1")
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.seconds, retry.retry_delay.nanos = 2, 500_000_000
        info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="denoised")
        for detail, name in ((bad, "BadRequest"), (retry, "RetryInfo"), (info, "ErrorInfo")):
            status.details.add(type_url=f"type.googleapis.com/google.rpc.{name}",
                               value=detail.SerializeToString())
        error = make_error("RESOURCE_EXHAUSTED", "full", status.SerializeToString())
        self.assertIsInstance(error, denoised.ResourceExhausted)
        self.assertIsInstance(error, denoised.DenoisedError)
        self.assertEqual((error.code, error.message, str(error)),
                         ("RESOURCE_EXHAUSTED", "full", "full"))
        self.assertEqual(error.violations,
                         (denoised.FieldViolation("params.steps", "is 0; use at least 1"),))
        self.assertEqual((error.retry_after, error.reason, error.domain),
                         (2.5, "QUEUE_FULL", "denoised"))

    def test_rubbish_in_details(self):
        error = make_error("INTERNAL", "broken", b"\xff\xff\xff")
        self.assertIsInstance(error, denoised.Internal)
        self.assertEqual((error.violations, error.retry_after, error.domain), ((), None, ""))
        self.assertIsInstance(make_error("SOMETHING_NEW", ""), denoised.Unknown)


class RetryTest(unittest.TestCase):
    def attempts(self, timeout=None, budget=100, **policy):
        return Attempts(RetryPolicy(**policy), RetryBudget(budget), timeout)

    def test_backoff_grows_within_its_upper_half(self):
        attempts = self.attempts(max_attempts=6, initial_backoff=1, max_backoff=5, multiplier=2)
        for most in (1, 2, 4, 5, 5):
            delay = attempts.failed(unavailable())
            self.assertGreaterEqual(delay, most / 2)
            self.assertLessEqual(delay, most)
        self.assertIsNone(attempts.failed(unavailable()))

    def test_backoff_does_not_overflow(self):
        for multiplier in (2, 2.0, 1e300):
            attempts = self.attempts(max_attempts=5000, multiplier=multiplier)
            full = denoised.ResourceExhausted("full", retry_after=0)
            delays = [attempts.failed(full) for _ in range(4000)]
            self.assertGreaterEqual(delays[-1], 5)
            self.assertLessEqual(delays[-1], 10)

    def test_what_brings_something_new_renews_the_attempts(self):
        attempts = self.attempts(max_attempts=2, restart_attempts=2, initial_backoff=1, max_backoff=9,
                                 multiplier=9)  # fmt: skip
        self.assertIsNotNone(attempts.failed(unavailable()))
        attempts.renew()
        self.assertLessEqual(attempts.failed(unavailable()), 1)
        self.assertIsNone(attempts.failed(unavailable()))

    def test_retry_info_is_the_least_wait(self):
        full = denoised.ResourceExhausted("full", retry_after=3.0)
        self.assertGreater(self.attempts().failed(full), 3)
        self.assertIsNone(self.attempts().failed(denoised.ResourceExhausted("too large")))

    def test_no_wait_outlasts_the_deadline(self):
        full = denoised.ResourceExhausted("full", retry_after=3.0)
        self.assertIsNone(self.attempts(timeout=2).failed(full))
        self.assertIsNotNone(self.attempts(timeout=30).failed(full))

    def test_other_codes_are_not_retried(self):
        for cls in (denoised.InvalidArgument, denoised.Internal, denoised.DeadlineExceeded,
                    denoised.FailedPrecondition, denoised.Cancelled):
            self.assertIsNone(self.attempts().failed(cls("no")))

    def test_a_call_that_succeeds_leaves_the_next_all_attempts(self):
        attempts = self.attempts(max_attempts=2)
        self.assertIsNotNone(attempts.failed(unavailable()))
        attempts.succeeded()
        self.assertIsNotNone(attempts.failed(unavailable()))

    def test_a_server_that_has_answered_is_waited_for_longer(self):
        def retries(error=unavailable(), **policy):
            attempts = Attempts(RetryPolicy(**policy), budget, None)
            return next(n for n in range(100) if attempts.failed(error) is None)

        budget = RetryBudget(100)
        self.assertEqual(retries(), 4)
        Attempts(RetryPolicy(), budget, None).succeeded()
        self.assertEqual(retries(), 9)
        self.assertEqual(retries(denoised.ResourceExhausted("full", retry_after=3.0)), 4)
        self.assertEqual(retries(denoised.FailedPrecondition("is loading", retry_after=2.0)), 9)
        self.assertEqual(retries(max_attempts=1), 0)
        self.assertEqual(retries(max_attempts=20), 19)

    def test_the_budget_is_shared(self):
        budget = RetryBudget(2)
        for _ in range(2):
            attempts = Attempts(RetryPolicy(), budget, None)
            attempts.failed(unavailable())  # a first attempt costs nothing
            attempts.failed(unavailable())
        self.assertTrue(budget.empty)
        self.assertIsNone(Attempts(RetryPolicy(), budget, None).failed(unavailable()))
        for _ in range(10):
            budget.succeeded()
        self.assertIsNotNone(Attempts(RetryPolicy(), budget, None).failed(unavailable()))

    def test_wrong_policies(self):
        for field, value in (("max_attempts", 0), ("budget", 0), ("multiplier", 0.5),
                             ("initial_backoff", -1)):
            with self.assertRaises(denoised.InvalidArgument):
                RetryPolicy(**{field: value})


class StreamTest(unittest.TestCase):
    def state(self, watch=None):
        policy = RetryPolicy(max_attempts=3, restart_attempts=3)
        state = StreamState(Attempts(policy, RetryBudget(10), None), [], watch)
        if watch is None:
            state.generate = pb.StreamGenerateRequest()
        return state

    @staticmethod
    def event(sequence, **kind):
        return pb.StreamGenerateResponse(sequence=sequence, request_id="job", **kind)

    def test_a_stream_that_begins_again_tells_only_what_is_new(self):
        preview = pb.PreviewEvent(evaluation=2, image=pb.Image(index=1))
        first = [self.event(1, queued={}), self.event(2, started={}),
                 self.event(3, progress={"evaluations_done": 4}), self.event(4, preview=preview),
                 self.event(5, image={"image": {"index": 0}})]
        state = self.state()
        self.assertEqual([type(state.received(e)).__name__ for e in first],
                         ["Queued", "Started", "Progress", "Preview", "ImageReady"])
        self.assertIsNotNone(state.ended(unavailable()))
        self.assertEqual([state.received(e) for e in first], [None] * 5)
        late = pb.PreviewEvent(evaluation=9, image=pb.Image(index=0))
        self.assertIsNone(state.received(self.event(6, preview=late)), "image 0 is there")
        self.assertIsNone(state.received(self.event(7, progress={"evaluations_done": 3})))
        self.assertIsNotNone(state.received(self.event(8, progress={"evaluations_done": 5})))
        self.assertIsNotNone(state.received(self.event(9, image={"image": {"index": 1}})))
        self.assertIsNotNone(state.received(self.event(10, completed={})))
        self.assertIsNone(state.ended(unavailable()), "lost after the last event")
        self.assertEqual([i.index for i in state.result()], [0, 1])

    def test_the_place_in_the_queue(self):
        state = self.state()

        def told(*places):
            events = [state.received(self.event(1, queued={"position": place, "images_ahead": 2 * place}))
                      for place in places]
            return [event and event.position for event in events]

        self.assertEqual(told(3, 1, 1, 2), [3, 1, None, 2])
        # Places that go to and fro are no reason to try for ever.
        self.assertIsNotNone(state.ended(unavailable()))
        self.assertEqual(told(3, 1), [3, 1])
        self.assertIsNotNone(state.ended(unavailable()))
        self.assertEqual(told(3), [3])
        with self.assertRaises(denoised.Unavailable):
            state.ended(unavailable())
        state.received(self.event(2, started={}))
        self.assertEqual(told(0), [None], "it does not wait any more")

    def test_a_watch_goes_on_after_the_last_event(self):
        state = self.state(pb.WatchJobRequest(request_id="job"))
        self.assertEqual(state.call(), ("WatchJob", pb.WatchJobRequest(request_id="job")))
        state.received(self.event(7, progress={"evaluations_done": 4}))
        state.ended(unavailable())
        method, request = state.call()
        self.assertEqual((method, request.request_id, request.after_sequence),
                         ("WatchJob", "job", 7))

    def test_an_id_that_the_client_chose_is_known_before_the_first_event(self):
        state = self.state()
        self.assertEqual(state.request_id, "")
        state.generate.params.request_id = "job"
        self.assertEqual(state.request_id, "job")
        self.assertEqual(self.state(pb.WatchJobRequest(request_id="watched")).request_id, "watched")
        state = self.state()
        state.received(self.event(1, queued={}))
        self.assertEqual(state.request_id, "job")

    def test_how_a_watched_job_ended_is_final(self):
        state = self.state(pb.WatchJobRequest(request_id="job"))
        state.received(self.event(1, queued={}))
        with self.assertRaises(denoised.Unavailable):
            state.ended(unavailable(domain="denoised"))

    def test_an_end_without_the_last_event(self):
        with self.assertRaises(denoised.DataLoss):
            self.state().ended(None)


class NamedLabelsTest(unittest.TestCase):
    """The look at a model for the names of its classes is a part of the call: it has its metadata, and takes of its
    time."""

    TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    DIGITS = pb.Model(name="digits", current=True, state=pb.MODEL_STATE_AVAILABLE, labels=["zero", "one"],
                      capabilities=pb.ModelCapabilities(class_label=True))
    EMOJI = pb.Model(name="emoji", current=True, state=pb.MODEL_STATE_AVAILABLE,
                     capabilities=pb.ModelCapabilities(text=True))
    STILL_LOADING = "^model digits is still loading; try again when it is available, or name another one$"
    OLD = pb.Model(name="digits", version="1", labels=["one"],
                   capabilities=pb.ModelCapabilities(class_label=True))

    def setUp(self):
        self.seen = []
        self.arguments = {"labels": ["one"], "timeout": 5, "metadata": {"x-tenant": "blue"},
                          "traceparent": self.TRACE}
        self.loading = 0
        self.hold(self.EMOJI, self.OLD, self.DIGITS)
        for name, seconds in (("POLL_SECONDS", 0.01), ("SECONDS", _convert.LoadingWait.SECONDS)):
            self.addCleanup(setattr, _convert.LoadingWait, name, getattr(_convert.LoadingWait, name))
            setattr(_convert.LoadingWait, name, seconds)

    def hold(self, *models):
        self.replies = {"GetModel": pb.GetModelResponse(model=models[-1]),
                        "ListModels": pb.ListModelsResponse(models=models), "Generate": pb.GenerateResponse()}

    def reply(self, name):
        reply = self.replies.get(name, iter([]))
        if name in ("GetModel", "ListModels") and self.loading:
            self.loading -= 1
            model = pb.Model(name="digits", current=True, state=pb.MODEL_STATE_LOADING)
            return pb.GetModelResponse(model=model) if name == "GetModel" else pb.ListModelsResponse(models=[model])
        return reply

    def see(self, name, request, timeout, metadata):
        self.seen.append((name, request, timeout, dict(metadata)))
        time.sleep(0.1)

    def check(self, method):
        (first, _, before, headers), (second, request, after, same_headers) = self.seen
        self.assertEqual((first, second), ("GetModel" if "model" in self.arguments else "ListModels", method))
        self.assertLessEqual(after, before - 0.1)
        self.assertEqual(headers, {"x-tenant": "blue", "traceparent": self.TRACE})
        self.assertEqual(same_headers, headers)
        self.assertEqual([c.class_label for c in request.params.conditions], [1])

    def client(self):
        client = denoised.Client("127.0.0.1:1")
        self.addCleanup(client.close)

        def method(name):
            def call(request, timeout, metadata):
                self.see(name, request, timeout, metadata)
                return self.reply(name)
            return call

        client._methods = {name: method(name) for name in ("GetModel", "ListModels", "Generate", "StreamGenerate")}
        return client

    def async_client(self):
        client = denoised.AsyncClient("127.0.0.1:1")

        class Stream:
            async def read(self):
                return grpc.aio.EOF

        def unary(name):
            async def call(request, timeout, metadata):
                self.see(name, request, timeout, metadata)
                return self.reply(name)
            return call

        def stream(request, timeout, metadata):
            self.see("StreamGenerate", request, timeout, metadata)
            return Stream()

        client._connect(None)
        client._methods = {name: unary(name) for name in ("GetModel", "ListModels", "Generate")}
        client._methods["StreamGenerate"] = stream
        return client

    def test_generate(self):
        self.client().generate(**self.arguments)
        self.check("Generate")

    def test_a_model_by_its_name(self):
        self.arguments["model"] = "digits"
        self.client().generate(**self.arguments)
        self.check("Generate")

    def test_a_model_that_is_loading_is_waited_for(self):
        async def main(arguments):
            async with self.async_client() as client:
                await client.generate(**arguments)

        for more in ({}, {"model": "digits"}):
            arguments = {**self.arguments, **more}
            for draw in (lambda: self.client().generate(**arguments), lambda: asyncio.run(main(arguments))):
                self.seen.clear()
                self.loading = 2
                draw()
                self.assertEqual(len(self.seen), 4, self.seen)
                self.assertEqual([c.class_label for c in self.seen[-1][1].params.conditions], [1])
                self.loading = 1000
                arguments["timeout"] = 0.4
                with self.assertRaisesRegex(denoised.FailedPrecondition, self.STILL_LOADING):
                    draw()
                self.loading = 0
                arguments["timeout"] = 5

    def test_another_model_that_is_loading_is_not_waited_for(self):
        async def main():
            async with self.async_client() as client:
                await client.generate(**self.arguments)

        cats = pb.Model(name="cats", current=True, state=pb.MODEL_STATE_LOADING)
        self.hold(cats, self.EMOJI, self.DIGITS)
        for draw in (lambda: self.client().generate(**self.arguments), lambda: asyncio.run(main())):
            self.seen.clear()
            draw()
            self.check("Generate")
        self.hold(cats, self.EMOJI)
        self.arguments["timeout"] = 0.3
        with self.assertRaisesRegex(denoised.FailedPrecondition, "^model cats is still loading"):
            self.client().generate(**self.arguments)

    def test_the_wait_for_a_model_ends(self):
        self.loading = 1000
        del self.arguments["timeout"]
        _convert.LoadingWait.SECONDS = 0.3
        with self.assertRaisesRegex(denoised.FailedPrecondition, self.STILL_LOADING):
            self.client().generate(**self.arguments)
        self.assertIn(len(self.seen), (2, 3))

    def test_a_client_that_retries_nothing_does_not_wait(self):
        self.loading = 1000
        client = denoised.Client("127.0.0.1:1", retry=RetryPolicy(max_attempts=1))
        self.addCleanup(client.close)
        client._methods = self.client()._methods
        with self.assertRaisesRegex(denoised.FailedPrecondition, self.STILL_LOADING):
            client.generate(labels="one")
        self.assertEqual(len(self.seen), 1)

    def test_a_late_answer_about_a_model_that_was_loading(self):
        wait = _convert.LoadingWait(Attempts(RetryPolicy(), RetryBudget(1), 5))
        for kind in (denoised.DeadlineExceeded, denoised.FailedPrecondition):
            with self.assertRaises(kind), wait.asking():
                raise denoised.DeadlineExceeded("late")
            wait.delay(_convert.model(pb.Model(name="digits", state=pb.MODEL_STATE_LOADING)))

    def test_models_that_cannot_be_chosen(self):
        twin = pb.Model()
        twin.CopyFrom(self.DIGITS)
        twin.name = "twin"
        failed = pb.Model(name="digits", current=True, state=pb.MODEL_STATE_FAILED, error="no memory")
        for models, kind, message in (
                ((self.DIGITS, twin), denoised.InvalidArgument, "^model is not set; use one of: digits, twin$"),
                ((self.EMOJI, self.EMOJI), denoised.InvalidArgument, "no model of the server reads labels$"),
                ((failed,), denoised.FailedPrecondition, "^model digits could not be loaded: no memory$")):
            self.hold(*models)
            with self.assertRaisesRegex(kind, message):
                self.client().generate(labels="one")

    def test_stream(self):
        self.client().stream(**self.arguments)
        self.check("StreamGenerate")

    def test_async_generate(self):
        async def main():
            async with self.async_client() as client:
                await client.generate(**self.arguments)
        asyncio.run(main())
        self.check("Generate")

    def test_async_stream(self):
        async def main():
            async with self.async_client() as client:
                with self.assertRaises(denoised.DataLoss):
                    await client.stream(**self.arguments).result()
        asyncio.run(main())
        self.check("StreamGenerate")


class RequestTest(unittest.TestCase):
    def params(self, **fields):
        names = inspect.signature(denoised.Client.generate).parameters
        return _convert.generation_params({**{name: None for name in names}, **fields})

    def test_the_seed_is_fixed_before_the_first_attempt(self):
        self.assertTrue(self.params().HasField("seed"))
        self.assertNotEqual(self.params().seed, self.params().seed)
        self.assertEqual(self.params(seed=0).seed, 0)
        self.assertEqual(list(self.params(seed=[3, 4]).seeds), [3, 4])
        self.assertFalse(self.params(seed=[3, 4]).HasField("seed"))

    def test_the_seed_of_a_request_id_is_that_of_the_cpp_library(self):
        # FNV-1a of "a", from the test vectors of draft-eastlake-fnv.
        self.assertEqual(self.params(request_id="a").seed, 0xAF63DC4C8601EC8C)

    def test_what_survives_has_an_id(self):
        self.assertRegex(self.params(survives=True).request_id, "^[0-9a-f]{32}$")
        self.assertEqual(self.params().request_id, "")

    def test_wrong_values_are_refused_before_the_call(self):
        for fields, word in (({"sampler": "best"}, "ddpm, ddim"), ({"format": "gif"}, "png, jpeg"),
                             ({"steps": "many"}, "^steps is 'many': "),
                             ({"seed": 2**64}, "^seed is 18446744073709551616: "),
                             ({"seed": 10**5000}, "^seed is "), ({"guidance_scale": 10**400}, "^guidance_scale is 1"),
                             ({"prompt": b"abc"}, "^prompt is b'abc': "),
                             ({"size": "large"}, "^size is 'large'"), ({"labels": 1.5}, "^labels is 1.5"),
                             ({"crop": 3}, "^crop is 3"), ({"strength": "half"}, "^strength is 'half'"),
                             ({"mask": object()}, "^mask has elements"),
                             ({"prompt": [1]}, r"^prompt is \[1\]"),
                             ({"prompt": ["a", "b"], "prompt_2": ["a", "b", "c"]}, "^prompt has 2 texts"),
                             ({"prompt": [], "prompt_2": "a"}, "^prompt has 0 texts"),
                             ({"labels": [1], "class_vectors": [1.0]}, "more than one of")):
            with self.subTest(fields=fields):
                with self.assertRaisesRegex(denoised.InvalidArgument, word):
                    self.params(**fields)

    def test_pictures_of_every_mode_of_pillow(self):
        try:
            import PIL.Image
        except ImportError:
            self.skipTest("needs Pillow")
        for mode, sent in (("RGB", "RGB"), ("LA", "LA"), ("P", "P"), ("CMYK", "RGB"), ("YCbCr", "RGB"), ("LAB", "RGB"),
                           ("PA", "RGBA"), ("RGBa", "RGBA")):
            with self.subTest(mode=mode):
                encoded = self.params(init_image=PIL.Image.new(mode, (2, 3))).init_image.encoded
                with PIL.Image.open(io.BytesIO(encoded)) as picture:
                    self.assertEqual((picture.format, picture.mode, picture.size), ("PNG", sent, (2, 3)))
        for mode in ("I", "I;16", "I;16B", "I;16L"):
            with self.subTest(mode=mode):
                encoded = self.params(init_image=PIL.Image.new(mode, (2, 3), 40000)).init_image.encoded
                self.assertEqual(encoded[24:26], b"\x10\0", "16 bits of gray")
                with PIL.Image.open(io.BytesIO(encoded)) as picture:
                    self.assertEqual(picture.getpixel((1, 2)), 40000)
        for mode, word in (("F", '^mask has pixels of floats, mode "F"; use '), ("La", "^mask is .*: conversion")):
            with self.assertRaisesRegex(denoised.InvalidArgument, word):
                self.params(mask=PIL.Image.new(mode, (2, 3)))

    def test_names_of_classes_may_be_in_any_container(self):
        for labels in (["zero"], ("zero",), {"zero": 1}.keys(), {"zero"}, iter(["zero"])):
            fields = _convert.fields_of({"labels": labels})
            self.assertTrue(_convert.needs_names(fields["labels"]))
            self.assertTrue(_convert.needs_names(fields["labels"]))
        for labels in (None, 1, 1.5, [1, 2], object()):
            self.assertFalse(_convert.needs_names(labels))

    def test_of_two_classes_of_one_name_the_first_is_meant(self):
        model = _convert.model(pb.Model(name="birds", labels=["crane", "wren", "crane"]))
        self.assertEqual(_convert.label_indices(["wren", "crane", 2], model), [1, 0, 2])

    def test_every_field_of_the_contract_can_be_asked_for(self):
        names = set(inspect.signature(denoised.Client.generate).parameters)
        elsewhere = {"conditions": "labels", "seeds": "seed", "width": "size", "height": "size",
                     "output": "format", "disconnect_policy": "survives",
                     "include_timings": "timings", "text_options": "clip_skip",
                     "size_conditions": "original_size"}
        for field in pb.GenerationParams.DESCRIPTOR.fields_by_name:
            self.assertIn(elsewhere.get(field, field), names)

    def test_prompts(self):
        def prompts(**given):
            return _convert.generation_params(dict(request_id=None, **given))
        params = prompts(prompt=["a", "b"], negative_prompt="c", clip_skip=1)
        self.assertEqual([(c.text, c.negative_text, c.HasField("text_2")) for c in params.conditions],
                         [("a", "c", False), ("b", "c", False)])
        self.assertEqual(params.text_options.clip_skip, 1)
        self.assertFalse(params.text_options.HasField("max_chunks"))
        self.assertEqual(prompts(prompt="a", max_chunks=2).text_options.max_chunks, 2)
        self.assertFalse(prompts(prompt="").conditions[0].HasField("negative_text"))
        for wrong in (dict(prompt="a", labels=[1]), dict(negative_prompt="a"), dict(max_chunks=1),
                      dict(prompt=["a", "b"], negative_prompt=["c", "d", "e"])):
            with self.assertRaises(denoised.InvalidArgument):
                prompts(**wrong)

    def test_vectors(self):
        def vectors(given):
            return [list(c.class_vector) for c in self.params(class_vectors=given).conditions]
        self.assertEqual(vectors(0.5), [[0.5]])
        self.assertEqual(vectors([0.5, 1]), [[0.5, 1]])
        self.assertEqual(vectors([[0.5, 1], [2, 3]]), [[0.5, 1], [2, 3]])

    def test_what_was_run_can_be_asked_for_again(self):
        for fields in (
                dict(prompt=["a", "b"], negative_prompt=["", "c"], prompt_2="d", clip_skip=1,
                     max_chunks=2, original_size=(3, 4), crop=(5, 6), target_size=7, seed=[1, 2],
                     image_guidance_scale=1.5, guidance_rescale=0.5, guidance_start=0.25,
                     guidance_stop=0.75),
                dict(labels=[3, 1], eta=0.5, s_churn=1, s_tmin=2, s_tmax=3, s_noise=4, solver_order=2,
                     sampler="heun", noise_schedule="karras", priority="batch", seed=2**64 - 1),
                dict(class_vectors=[[1, 2], [3, 4]], seed=1)):
            with self.subTest(fields=fields):
                asked = self.params(model="m", count=2, size=(8, 16), steps=3, guidance_scale=2.5,
                                    format="jpeg", quality=7, embed_metadata=False, **fields)
                again = _convert.params(asked, pb.Run()).again
                self.assertEqual(self.params(**again), asked)

    def test_wrong_labels_and_previews_are_refused_before_the_call(self):
        with denoised.Client("127.0.0.1:1") as client:
            for labels in (1.5, object()):
                with self.assertRaisesRegex(denoised.InvalidArgument, "^labels is "):
                    client.generate(labels=labels)
            for previews, word in ((denoised.Previews(every="x"), "^previews.every is 'x': "),
                                   (denoised.Previews(max_edge=2**40), "^previews.max_edge is "),
                                   ("x", "^previews is 'x'; use True")):
                with self.assertRaisesRegex(denoised.InvalidArgument, word):
                    list(client.stream(labels=1, previews=previews))

    def test_previews_name_their_decoder(self):
        self.assertEqual(_convert.preview_options(True).decoder, pb.PREVIEW_DECODER_UNSPECIFIED)
        self.assertEqual(_convert.preview_options(denoised.Previews(decoder="tiny")).decoder,
                         pb.PREVIEW_DECODER_TINY)
        with self.assertRaises(denoised.InvalidArgument):
            _convert.preview_options(denoised.Previews(decoder="large"))

    def test_a_type_of_the_server_is_no_markup(self):
        def image(mime_type):
            return _convert.image(pb.Image(seed=1, mime_type=mime_type, encoded=b"abc"), None)
        self.assertEqual(image("image/svg+xml").data_uri(), "data:image/svg+xml;base64,YWJj")
        html = notebook.gallery([image('image/png" onerror="alert(1)"><script>')])
        self.assertIn('<img src="data:image/png%22%20onerror%3D%22alert%281%29%22%3E%3Cscript%3E;base64,YWJj" alt="seed 1"',
                      html)

    def test_a_stage_of_the_timeline(self):
        entries = _convert.timeline(pb.Timeline(entries=[
            pb.TimelineEntry(milestone=pb.TimelineEntry.MILESTONE_QUEUED),
            pb.TimelineEntry(milestone=pb.TimelineEntry.MILESTONE_STAGE, stage=pb.STAGE_DECODE,
                             image_index=1, device_seconds=0.5)]))
        self.assertEqual([(e.milestone, e.stage, e.device_seconds) for e in entries],
                         [("queued", None, None), ("stage", "decode", 0.5)])

    def test_all_four_signatures_are_equal(self):
        def parameters(method):
            found = dict(inspect.signature(method).parameters)
            found.pop("previews", None)
            return found
        expected = parameters(denoised.Client.generate)
        for method in (denoised.Client.stream, denoised.AsyncClient.generate,
                       denoised.AsyncClient.stream):
            self.assertEqual(parameters(method), expected)
        self.assertEqual(inspect.signature(denoised.Client), inspect.signature(denoised.AsyncClient))

    def test_names_are_those_of_the_contract(self):
        for literal, enum in ((types.Sampler, pb.Sampler), (types.NoiseSchedule, pb.NoiseSchedule),
                              (types.ImageFormat, pb.ImageFormat), (types.Priority, pb.Priority),
                              (types.PreviewKind, pb.PreviewKind)):
            self.assertEqual(list(typing.get_args(literal)), _convert.names_of(enum))


class TargetTest(unittest.TestCase):
    def test_targets(self):
        self.assertFalse(_parse_target("images:50051").replicas)
        self.assertTrue(_parse_target("127.0.0.1:50051").direct)
        self.assertTrue(_parse_target("dns:///images:50051").replicas)
        several = _parse_target("10.0.0.1:1,10.0.0.2:2")
        self.assertEqual((several.uri, several.authority), ("ipv4:10.0.0.1:1,10.0.0.2:2", "10.0.0.1:1"))
        self.assertEqual(_parse_target("[::1]:1,[::2]:2").uri, "ipv6:%5B::1%5D:1,%5B::2%5D:2")
        for text in ("[fd00::1]:65535", "grüße.example:1", "unix:/run/denoised", "unix-abstract:denoised",
                     "vsock:2:50051", "xds:///images", "ipv6:%5B::1%5D:1", "dns://8.8.8.8/images:1"):
            with self.subTest(text=text):
                self.assertEqual(_parse_target(text).uri, text)

    def test_wrong_targets(self):
        for text in ("", "http://x:1", "images", "a:1,b:2", "10.0.0.1:1,[::1]:2", "10.0.0.1:1,10.0.0.2",
                     "10.0.0.1:0,10.0.0.2:1", "10.0.0.1:+1,10.0.0.2:1", "[[::1]]:1,[::2]:1"):
            with self.subTest(text=text):
                with self.assertRaises(denoised.InvalidArgument):
                    denoised.Client(text)

    def test_what_is_no_host_and_port(self):
        for text in ("x:abc", "x:0", "x:65536", "x:-1", "x: 1", "x:1_0", "x:", ":1", "fd00::1:50051", "[fd00::1]",
                     "[fd00::1:50051", "[10.0.0.1]:1", "x/page", "x:1/page", "a b:1", "me@x:1", "x?:1",
                     "x:" + "9" * 5000):
            with self.subTest(text=text[:20]):
                with self.assertRaisesRegex(denoised.InvalidArgument, "not host:port with a port from 1 to 65535"):
                    denoised.Client(text)

    def test_a_token_is_not_sent_in_plaintext(self):
        for options in ({"token": "secret"}, {"token_file": __file__},
                        {"metadata": {"Authorization": "Bearer secret"}}):
            with self.assertRaisesRegex(denoised.InvalidArgument, "needs tls"):
                denoised.Client("images:50051", **options)
        denoised.Client("images:50051", token="secret", allow_plaintext_token=True).close()

    def test_wrong_options(self):
        for options, word in (({"tls": denoised.TLS(cert="x")}, "belong together"),
                              ({"tls": True, "token": "a b"}, "printable"),
                              ({"metadata": {"a b": "c"}}, "not legal"),
                              *(({"metadata": {key.title(): "x"}}, f'"{key}" is reserved')
                                for key in ("grpc-timeout", "te", "content-type", "user-agent", "host", "connection",
                                            "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")),
                              ({"metadata": {"a": "ü"}}, "printable"), ({"metadata": {"a": 1}}, "value 1; use printable"),
                              ({"metadata": {"a": b"b"}}, "value b'b'; use printable"),
                              ({"metadata": {"a-bin": "b"}}, "value 'b'; use bytes"),
                              ({"metadata": {1: "a"}}, "key 1 is not legal; use a string"),
                              ({"metadata": [("a", "b")]}, "^metadata is .*; use a mapping")):
            with self.assertRaisesRegex(denoised.InvalidArgument, word):
                denoised.Client("images:50051", **options)
            if "metadata" in options:
                with denoised.Client("images:50051") as client, \
                        self.assertRaisesRegex(denoised.InvalidArgument, word):
                    client.generate(**options)
        with denoised.Client("images:50051", metadata={"A-bin": b"\xff", "B": "b"}) as client:
            self.assertEqual(client._connection.headers({"b": "c"}, None), [("a-bin", b"\xff"), ("b", "c")])
        with self.assertRaisesRegex(denoised.InvalidArgument, "tls.ca"):
            denoised.Client("images:50051", tls=denoised.TLS(ca="/no/such/file"))

    def test_timeouts(self):
        def remaining(default, timeout):
            with denoised.Client("images:50051", timeout=default) as client:
                return client._connection.attempts(timeout).remaining()
        for endless in (float("inf"), 1e10, 10**400):
            self.assertIsNone(remaining(None, endless))
            self.assertIsNone(remaining(endless, None))
            self.assertIsNone(remaining(5, endless))
        self.assertGreater(remaining(None, 1e9), 9e8)
        self.assertEqual(remaining(5, -1), 0, "what is left of a time that is over")
        for wrong in (float("nan"), "3", True):
            for arguments in ((wrong, None), (None, wrong)):
                with self.assertRaisesRegex(denoised.InvalidArgument, "^timeout is .*; use seconds"):
                    remaining(*arguments)

    def test_traceparent_is_checked(self):
        trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
        good = f"00-{trace}-{parent}-01"
        with denoised.Client("images:50051") as client:
            headers = client._connection.headers
            for text in (good, f"01-{trace}-{parent}-01", f"cc-{trace}-{parent}-00-what-will-be-the-future"):
                self.assertEqual(headers(None, text), [("traceparent", text)])
            for text in ("", "abc", f"00-{trace}-{parent}", f"00-{trace}-{parent}-01-x", f"ff-{trace}-{parent}-01",
                         f"00-{'0' * 32}-{parent}-01", f"00-{trace}-{'0' * 16}-01", f"00-{trace.upper()}-{parent}-01",
                         f"00-{trace}-{parent}-1", good + "\n", f"01-{trace}-{parent}-01-\n", 5):
                for call in (client.generate, client.stream, lambda **options: client.jobs.watch("x", **options)):
                    with self.subTest(text=text), self.assertRaises(denoised.InvalidArgument) as caught:
                        call(traceparent=text)
                    self.assertIn(f"traceparent is {text!r}; use the form", str(caught.exception))
            with self.assertRaisesRegex(denoised.InvalidArgument, "twice"):
                headers({"Traceparent": good}, good)

    def test_what_is_wrong_with_a_watch_is_named(self):
        client = denoised.Client("images:50051")
        self.addCleanup(client.close)
        for watch in (client.jobs.watch, denoised.AsyncClient("images:50051").jobs.watch):
            for arguments, word in ((("job", -1), "^after is -1: "), (("job", "x"), "^after is 'x': "),
                                    ((5, 0), "^request_id is 5: ")):
                with self.assertRaisesRegex(denoised.InvalidArgument, word):
                    watch(arguments[0], after=arguments[1])

    def test_jobs_need_one_server(self):
        with denoised.Client("dns:///images:50051") as client:
            for call in (lambda: client.jobs.get("x"), lambda: client.jobs.watch("x"),
                         lambda: client.models.unload("x")):
                with self.assertRaisesRegex(denoised.InvalidArgument, "stands for several"):
                    call()


class ClashTest(unittest.TestCase):
    def test_other_copies_of_the_same_contracts(self):
        """protobuf refuses a second file or message of one name. Other packages bring these."""
        pool = descriptor_pool.Default()
        for name, package, message in (("google/rpc/status.proto", "google.rpc", "Status"),
                                       ("google/rpc/error_details.proto", "google.rpc", "ErrorInfo"),
                                       ("grpc/health/v1/health.proto", "grpc.health.v1",
                                        "HealthCheckRequest"),
                                       ("grpc_service.proto", "inference", "ModelInferRequest")):
            file = descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax="proto3")
            file.message_type.add(name=message)
            pool.AddSerializedFile(file.SerializeToString())
            pool.FindMessageTypeByName(f"{package}.{message}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
