#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python client against the server with mnist-32 on the CPU."""

import asyncio
import datetime
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import support

try:
    import numpy
    import PIL.Image  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}; install python3-numpy and python3-pil")
    sys.exit(77)

import denoised

PATIENT = denoised.RetryPolicy(max_attempts=100, max_backoff=0.5)
LONG = {"steps": 1000, "count": 64, "labels": [1]}  # minutes on a CPU
NEVER = denoised.RetryPolicy(max_attempts=1)
SERVER = None


class LosingReplies(support.Proxy):
    """With `loses` set, it breaks all connections, once, in place of forwarding what the server says next."""

    loses = False

    def _copy(self, source, sink):
        try:
            from_server = source.getpeername() == self.target
            while data := source.recv(65536):
                if from_server and self.loses:
                    self.loses = False
                    self.cut()
                    break
                sink.sendall(data)
        except OSError:
            pass  # cut
        super()._copy(source, sink)  # tells both ends


def setUpModule():
    global SERVER
    SERVER = support.serve("--max-queued-images", "512")
    unittest.addModuleCleanup(SERVER.__exit__)
    support.address(SERVER)


class ClientTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.address = support.address(SERVER)
        self.client = denoised.Client(self.address)
        self.addCleanup(self.client.close)

    def raises(self, cls, call, *words):
        with self.assertRaises(cls) as caught:
            call()
        for word in words:
            self.assertIn(word, str(caught.exception))
        return caught.exception

    def wait_for_state(self, request_id, state, client=None):
        give_up = time.monotonic() + 60
        while (job := (client or self.client).jobs.get(request_id)).state != state:
            self.assertLess(time.monotonic(), give_up, job)
            time.sleep(0.05)
        return job

    # Images

    def test_prompts(self):
        model = support.ROOT / "tests" / "models" / "latent" / "sdxl"
        with support.serve("--model", f"words={model}") as server, \
                denoised.Client(support.address(server)) as client:
            words = client.models.get("words")
            self.assertEqual((words.capabilities.text, words.pipeline, words.capabilities.second_text),
                             (True, "StableDiffusionXLPipeline", True))
            one = client.generate("a red apple", model="words", negative_prompt="blurry", seed=3,
                                  steps=2)
            again = client.generate(["a red apple", "thin threads " * 40], model="words", seed=3,
                                    negative_prompt="blurry", steps=2, count=2)
            self.assertEqual(one.images[0].data, again.images[0].data)
            self.assertIn(b"tEXtprompt\0a red apple", one.images[0].data)
            self.assertIn(b"tEXtnegative_prompt\0blurry", one.images[0].data)
            self.assertEqual(again.params.prompts[0].negative, "blurry")
            self.assertEqual(again.params.prompts[0].cut_off, "")
            self.assertTrue(again.params.prompts[1].cut_off.endswith("thin threads"))
            self.raises(denoised.InvalidArgument, lambda: client.generate(model="words"), "conditions")

    def test_generate(self):
        result = self.client.generate(labels=["seven", 3], count=2, seed=2**64 - 1, steps=3,
                                      sampler="heun", request_id="python")
        self.assertEqual([i.seed for i in result], [2**64 - 1, 0])
        self.assertEqual([i.label for i in result], [7, 3])
        self.assertEqual((len(result), result[1].index, result[-1].seed), (2, 1, 0))
        params = result.params
        self.assertEqual((params.model, params.steps, params.sampler, params.request_id),
                         ("digits", 3, "heun", "python"))
        self.assertEqual(params.evaluations, 5)
        self.assertIs(result[0].params, params)
        self.assertGreater(result.timing.total_seconds, 0)
        self.assertEqual(result.timeline, [])

    def test_images_as_files_arrays_and_pictures(self):
        png = self.client.generate(labels=7, seed=1, steps=2)[0]
        raw = self.client.generate(labels=7, seed=1, steps=2, format="raw_uint8")[0]
        real = self.client.generate(labels=7, seed=1, steps=2, format="raw_float32")[0]
        png.save(self.folder / "a.png")
        self.assertEqual((self.folder / "a.png").read_bytes(), png.bytes())
        self.assertTrue(png.bytes().startswith(b"\x89PNG"))
        self.assertEqual(raw.shape, (32, 32, 1))
        numpy.testing.assert_array_equal(png.numpy(), raw.numpy())
        numpy.testing.assert_array_equal(numpy.array(raw.pil()), raw.numpy()[:, :, 0])
        self.assertEqual((real.numpy().dtype, real.numpy().shape), (numpy.float32, (32, 32, 1)))
        numpy.testing.assert_allclose(numpy.array(real.pil()), raw.numpy()[:, :, 0], atol=1)
        real.save(self.folder / "a.npy")
        numpy.testing.assert_array_equal(numpy.load(self.folder / "a.npy"), real.numpy())
        self.assertIn("image/png", png._repr_mimebundle_())
        self.assertIn("image/png", raw._repr_mimebundle_())

    def test_image_to_image(self):
        first = self.client.generate(labels=7, seed=1, steps=2)[0]
        path = self.folder / "a.png"
        first.save(path)
        arguments = {"labels": 7, "seed": 2, "steps": 4, "strength": 0.5}
        expected = self.client.generate(init_image=path.read_bytes(), **arguments)
        self.assertEqual(expected.params.strength, 0.5)
        for source in (path, str(path), first, first.pil(), first.numpy()):
            with self.subTest(source=type(source)):
                drawn = self.client.generate(init_image=source, **arguments)[0]
                numpy.testing.assert_array_equal(drawn.numpy(), expected[0].numpy())

    def test_noise_and_seeds_of_ones_own(self):
        noise = numpy.random.default_rng(1).standard_normal((1, 32, 32, 1))
        drawn = [self.client.generate(labels=7, seed=seed, steps=2, initial_noise=noise,
                                      sampler="euler")[0] for seed in (1, 2)]
        numpy.testing.assert_array_equal(drawn[0].numpy(), drawn[1].numpy())
        result = self.client.generate(labels=7, seed=[9, 4], count=2, steps=2)
        self.assertEqual([i.seed for i in result], [9, 4])

    def test_the_same_bytes_as_the_command(self):
        subprocess.run([os.environ["DENOISE_BINARY"], "generate", "--server", self.address, "-l", "3,7",
                        "--seed", "11", "--steps", "3", "-o", "{index}.png"], cwd=self.folder,
                       check=True, capture_output=True)
        result = self.client.generate(labels=[3, 7], count=2, seed=11, steps=3)
        for image in result:
            self.assertEqual(image.bytes(), (self.folder / f"{image.index}.png").read_bytes())

    # Streams

    # A preview that is not sent before its image is there never is. A busy machine is given more time.
    STEPS_FOR_PREVIEWS = (4, 16, 64, 256)

    def test_stream_with_previews(self):
        for steps in self.STEPS_FOR_PREVIEWS:
            stream = self.client.stream(labels=[3, 7], count=2, seed=11, steps=steps, previews=True,
                                        timings=True)
            events = list(stream)
            previews = [e for e in events if isinstance(e, denoised.Preview)]
            if previews:
                break
        self.assertIsInstance(events[0], denoised.Queued)
        self.assertEqual(events[0].params.seed, 11)
        self.assertIsInstance(events[1], denoised.Started)
        self.assertIsInstance(events[-1], denoised.Completed)
        self.assertEqual(stream.request_id, events[0].request_id)
        self.assertIn("sent", [entry.milestone for entry in events[-1].timeline])
        numbers = [e.sequence for e in events]
        self.assertEqual(numbers, sorted(set(numbers)))
        self.assertTrue(previews)
        self.assertEqual(previews[0].evaluations, steps)
        self.assertEqual(previews[0].image.pil().format, "JPEG")
        progress = [e for e in events if isinstance(e, denoised.Progress)]
        self.assertEqual((progress[-1].evaluations_done, progress[-1].evaluations_total), (2 * steps, 2 * steps))
        images = [e.image for e in events if isinstance(e, denoised.ImageReady)]
        expected = self.client.generate(labels=[3, 7], count=2, seed=11, steps=steps)
        self.assertEqual(sorted(i.bytes() for i in images), sorted(i.bytes() for i in expected))
        self.assertEqual([i.bytes() for i in stream.result()], [i.bytes() for i in expected])

    def test_previews_as_asked(self):
        for steps in self.STEPS_FOR_PREVIEWS:
            stream = self.client.stream(labels=7, steps=steps, previews=denoised.Previews(
                kind="noisy_state", every=2, max_edge=16, format="png"))
            shown = [e for e in stream if isinstance(e, denoised.Preview)]
            if shown:
                break
        self.assertTrue(shown)
        for preview in shown:
            self.assertEqual(preview.evaluation % 2, 0)
            self.assertEqual((preview.image.mime_type, preview.image.width), ("image/png", 16))

    def test_cancel(self):
        stream = self.client.stream(request_id="cancelled-here", **LONG)
        next(stream)
        stream.cancel()
        error = self.raises(denoised.Cancelled, lambda: list(stream), "by the caller")
        self.assertEqual(error.domain, "")
        self.wait_for_state("cancelled-here", "cancelled")
        self.raises(denoised.Cancelled, stream.result)
        with self.client.stream(request_id="left", **LONG) as stream:
            next(stream)
        self.wait_for_state("left", "cancelled")

    def test_somebody_else_cancels(self):
        stream = self.client.stream(request_id="cancelled-there", **LONG)
        next(stream)
        self.assertIn(self.client.jobs.cancel("cancelled-there").state, ("queued", "running"))
        error = self.raises(denoised.Cancelled, lambda: list(stream))
        self.assertEqual(error.domain, "denoised")

    # Jobs

    def test_a_job_survives_its_connection(self):
        with self.client.stream(labels=7, seed=5, count=3, steps=3, survives=True) as stream:
            queued = next(stream)
        result = self.client.jobs.watch(queued.request_id).result()
        expected = self.client.generate(labels=7, seed=5, count=3, steps=3)
        self.assertEqual([i.bytes() for i in result], [i.bytes() for i in expected])
        job = self.client.jobs.get(queued.request_id)
        self.assertEqual((job.state, job.images_done, job.error), ("succeeded", 3, ""))
        age = datetime.datetime.now(datetime.timezone.utc) - job.create_time
        self.assertLess(abs(age.total_seconds()), 120)
        self.assertGreaterEqual(job.end_time, job.start_time)
        self.assertIn(job.request_id, [j.request_id for j in self.client.jobs.list(all_clients=True)])
        self.assertEqual(len(self.client.jobs.list(all_clients=True, limit=1)), 1)
        later = list(self.client.jobs.watch(queued.request_id, after=job.last_sequence - 1))
        self.assertEqual([e.sequence for e in later], [job.last_sequence])

    def test_a_watch_survives_broken_connections(self):
        proxy = support.Proxy(self.address)
        self.addCleanup(proxy.close)
        with denoised.Client(proxy.address, retry=PATIENT) as far:
            with self.client.stream(labels=7, seed=6, count=8, steps=10, survives=True) as stream:
                queued = next(stream)
            events, cuts = [], 0
            for event in far.jobs.watch(queued.request_id):
                events.append(event)
                done = event.evaluations_done if isinstance(event, denoised.Progress) else 0
                if isinstance(event, denoised.Queued) or (cuts == 1 and done > 20):
                    proxy.cut()
                    cuts += 1
            self.assertEqual((cuts, proxy.accepted), (2, 3))
        numbers = [e.sequence for e in events]
        self.assertEqual(numbers, sorted(set(numbers)))
        images = {e.image.index: e.image for e in events if isinstance(e, denoised.ImageReady)}
        self.assertEqual(len([e for e in events if isinstance(e, denoised.ImageReady)]), 8)
        expected = self.client.generate(labels=7, seed=6, count=8, steps=10)
        self.assertEqual([images[i].bytes() for i in range(8)], [i.bytes() for i in expected])

    # Errors

    def test_errors(self):
        error = self.raises(denoised.InvalidArgument,
                            lambda: self.client.generate(steps=0, count=-1), "params.steps")
        self.assertEqual({v.field for v in error.violations}, {"params.steps", "params.count"})
        self.assertEqual((error.reason, error.domain), ("INVALID_FIELDS", "denoised"))
        self.assertEqual(error.violations, self.raises(
            denoised.InvalidArgument,
            lambda: list(self.client.stream(steps=0, count=-1))).violations)
        self.raises(denoised.InvalidArgument, lambda: self.client.generate(labels=["eleven"]), "eleven")
        self.raises(denoised.NotFound, lambda: self.client.generate(model="cats"), "cats", "digits")
        self.raises(denoised.NotFound, lambda: self.client.jobs.get("nobody"), "nobody")
        self.raises(denoised.NotFound, lambda: self.client.healthy("nobody"))
        self.client.generate(labels=7, seed=1, steps=1, request_id="taken", survives=True)
        error = self.raises(denoised.AlreadyExists, lambda: self.client.generate(
            labels=8, seed=1, steps=1, request_id="taken", survives=True))
        self.assertEqual(error.domain, "denoised")

    def test_deadlines(self):
        begin = time.monotonic()
        self.raises(denoised.DeadlineExceeded, lambda: self.client.generate(timeout=0.2, **LONG))
        self.raises(denoised.DeadlineExceeded,
                    lambda: list(self.client.stream(timeout=0.2, **LONG)))
        with denoised.Client(self.address, timeout=0.2) as hurried:
            self.raises(denoised.DeadlineExceeded, lambda: hurried.generate(**LONG))
        self.assertLess(time.monotonic() - begin, 60)

    def test_no_server(self):
        nobody = "127.0.0.1:1"
        with denoised.Client(nobody, retry=NEVER) as client:
            self.raises(denoised.Unavailable, client.server_info, nobody)
            self.raises(denoised.Unavailable, lambda: list(client.stream()), nobody)
        begin = time.monotonic()
        with denoised.Client(nobody) as client:
            self.raises(denoised.Unavailable, client.server_info)
        self.assertGreater(time.monotonic() - begin, 0.05 + 0.1 + 0.2 + 0.4, "it did not retry")

    # Server and models

    def test_server_and_models(self):
        info = self.client.server_info()
        self.assertEqual((info.state, info.client, info.devices[0].name), ("serving", "anonymous", "cpu"))
        self.assertIn("model_admin", info.features)
        self.assertEqual(info.limits["max_queued_images"], 512)
        self.assertTrue(self.client.healthy())
        model = self.client.models.get()
        self.assertEqual(model.name, "digits")
        self.assertEqual(model.labels[7], "seven")
        self.assertEqual((model.capabilities.class_label, model.limits.num_classes), (True, 10))
        self.assertIn(model.defaults.sampler, model.samplers)

    def test_models_are_changed(self):
        models = self.client.models
        loaded = models.load("digits", keep_current=True)
        self.assertEqual((loaded.version, loaded.current), ("2", False))
        self.assertEqual(models.alias("best", "digits@2").version, "2")
        self.assertEqual(self.client.generate(model="best", labels=7, steps=1).params.model_version, "2")
        models.delete_alias("best")
        self.raises(denoised.NotFound, lambda: models.get("best"))
        models.unload("digits@2")
        self.assertEqual([m.version for m in models.list()], ["1"])

    def test_what_may_have_been_done_is_not_tried_again(self):
        """The change is made, and its reply is lost. Another attempt would find nothing to change."""
        models = self.client.models

        def is_gone(name):
            give_up = time.monotonic() + 60
            while time.monotonic() < give_up:
                try:
                    models.get(name)
                except denoised.NotFound:
                    return True
                time.sleep(0.02)
            return False

        def change(address, proxy, method, name):
            with denoised.Client(address, retry=PATIENT) as far:
                far.server_info()
                time.sleep(0.2)  # until all is said that is no reply
                proxy.loses = True
                getattr(far.models, method)(name)

        async def change_async(address, proxy, method, name):
            async with denoised.AsyncClient(address, retry=PATIENT) as far:
                await far.server_info()
                await asyncio.sleep(0.2)
                proxy.loses = True
                await getattr(far.models, method)(name)

        for run in (change, lambda *arguments: asyncio.run(change_async(*arguments))):
            models.load("digits", version="lost", keep_current=True)
            models.alias("lost", "digits@lost")
            for method, name in (("delete_alias", "lost"), ("unload", "digits@lost")):
                with self.subTest(method):
                    proxy = LosingReplies(self.address)
                    self.addCleanup(proxy.close)
                    self.raises(denoised.Unavailable, lambda: run(proxy.address, proxy, method, name))
                    self.assertTrue(is_gone(name))

    # A server that goes away

    def restart(self, draw):
        """Kills the server after the first image of `draw` and starts another on its port."""
        address = f"127.0.0.1:{support.free_port()}"
        first = support.serve("--max-slots", "4", listen=address)
        self.addCleanup(first.__exit__)
        support.address(first)
        started = []

        def on_image():
            if not started:
                first.process.send_signal(signal.SIGKILL)
                first.process.wait()
                started.append(support.serve("--max-slots", "4", listen=address))
                self.addCleanup(started[0].__exit__)

        # Several servers, of which there is one: it is called when its health says so.
        events = draw(f"dns:///{address}", on_image)
        self.assertTrue(started)
        images = [e.image for e in events if isinstance(e, denoised.ImageReady)]
        self.assertEqual(sorted(i.index for i in images), list(range(len(images))))
        self.assertEqual(len([e for e in events if isinstance(e, denoised.Queued)]), 1)
        seed = events[0].params.seed
        expected = self.client.generate(labels=7, seed=seed, count=len(images), steps=4)
        by_index = sorted(images, key=lambda image: image.index)
        self.assertEqual([i.bytes() for i in by_index], [i.bytes() for i in expected])

    # More images than slots, so that some are done while others wait.
    MANY = {"labels": 7, "count": 12, "steps": 4}

    def test_a_stream_outlives_its_server(self):
        def draw(target, on_image):
            events = []
            with denoised.Client(target, retry=PATIENT, timeout=100) as client:
                for event in client.stream(**self.MANY):
                    events.append(event)
                    if isinstance(event, denoised.ImageReady):
                        on_image()
            return events
        self.restart(draw)

    def test_an_async_stream_outlives_its_server(self):
        async def read(target, on_image):
            events = []
            async with denoised.AsyncClient(target, retry=PATIENT, timeout=100) as client:
                async for event in client.stream(**self.MANY):
                    events.append(event)
                    if isinstance(event, denoised.ImageReady):
                        on_image()
            return events
        self.restart(lambda *arguments: asyncio.run(read(*arguments)))

    # asyncio

    def asynchronous(self, main):
        async def run():
            async with denoised.AsyncClient(self.address) as client:
                return await asyncio.wait_for(main(client), 100)
        return asyncio.run(run())

    def test_async_calls_run_at_once(self):
        async def main(client):
            one = asyncio.gather(*(client.generate(labels=["seven"], seed=i, steps=2)
                                   for i in range(24)))

            async def read(i):
                return await client.stream(labels="seven", seed=i, steps=2, previews=True).result()
            two = asyncio.gather(*(read(i) for i in range(24)))
            return await one, await two
        unary, streamed = self.asynchronous(main)
        together = self.client.generate(labels=7, seed=0, count=24, steps=2)
        for results in (unary, streamed):
            self.assertEqual([r[0].bytes() for r in results], [i.bytes() for i in together])

    def test_async_calls_about_everything_else(self):
        async def main(client):
            self.assertTrue(await client.healthy())
            self.assertEqual((await client.server_info()).state, "serving")
            self.assertEqual([m.name for m in await client.models.list()], ["digits"])
            stream = client.stream(request_id="async", **LONG)
            self.assertIsInstance(await stream.__anext__(), denoised.Queued)
            await client.jobs.cancel("async")
            with self.assertRaises(denoised.Cancelled):
                await stream.result()
            self.assertEqual((await client.jobs.get("async")).state, "cancelled")
            self.assertIn("async", [j.request_id for j in await client.jobs.list(all_clients=True)])
            with self.assertRaises(denoised.Cancelled):
                await client.jobs.watch("async").result()
            with self.assertRaises(denoised.InvalidArgument) as caught:
                await client.generate(steps=0)
            self.assertEqual(caught.exception.violations[0].field, "params.steps")
        self.asynchronous(main)

    def test_async_cancellation(self):
        async def main(client):
            task = asyncio.ensure_future(client.generate(request_id="task", **LONG))
            while True:
                try:
                    await client.jobs.get("task")
                    break
                except denoised.NotFound:
                    await asyncio.sleep(0.02)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            stream = client.stream(request_id="stream", **LONG)
            await stream.__anext__()
            stream.cancel()
            with self.assertRaises(denoised.Cancelled):
                await stream.result()
        self.asynchronous(main)
        self.wait_for_state("task", "cancelled")
        self.wait_for_state("stream", "cancelled")

    def test_a_read_that_is_given_up_ends_the_stream(self):
        async def main(client):
            stream = client.stream(request_id="given-up", **LONG)
            await stream.__anext__()
            with self.assertRaises(asyncio.TimeoutError):
                while True:
                    await asyncio.wait_for(stream.__anext__(), 0.001)
            # gRPC has ended the call; nobody has cancelled this task.
            with self.assertRaises(denoised.Cancelled):
                await stream.__anext__()
            with self.assertRaises(denoised.Cancelled):
                await stream.result()
        self.asynchronous(main)
        self.wait_for_state("given-up", "cancelled")

    def test_async_calls_work_with_files_on_other_threads(self):
        threads = []

        class Path(os.PathLike):
            def __init__(self, path):
                self.path = path

            def __fspath__(self):
                threads.append(threading.current_thread())
                return str(self.path)

        class Picture:
            """What is asked of Pillow's."""

            mode = "L"

            def getbands(self):
                return ("L",)

            def save(self, file, kind):
                threads.append(threading.current_thread())
                file.write(first.bytes())

        first = self.client.generate(labels=7, seed=1, steps=2)[0]
        first.save(self.folder / "a.png")
        (self.folder / "token").write_text("x" * 43)  # which this server does not ask for
        drawing = {"labels": 7, "steps": 2, "strength": 0.5}

        async def main():
            async with denoised.AsyncClient(self.address, token_file=Path(self.folder / "token"),
                                            allow_plaintext_token=True) as client:
                threads.clear()  # making the client reads the file, to say at once what is wrong
                await client.server_info()
                await client.generate(init_image=Path(self.folder / "a.png"), mask=Picture(), **drawing)
                await client.stream(init_image=Picture(), request_id="files", survives=True, **drawing).result()
                await client.jobs.watch("files").result()

        asyncio.run(main())
        self.assertEqual(len(threads), 4 + 3)  # the token for each attempt, and the pictures
        self.assertNotIn(threading.main_thread(), threads)

    # TLS and tokens

    def test_tls_and_tokens(self):
        def openssl(*arguments):
            subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

        def path(name):
            return str(self.folder / name)

        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
        openssl("req", "-x509", *key, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
        for name, host in (("server", "images.test"), ("studio", "studio")):
            openssl("req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", "csr")
            (self.folder / "ext").write_text(f"subjectAltName=DNS:{host}")
            openssl("x509", "-req", "-in", "csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-days", "1",
                    "-CAcreateserial", "-extfile", "ext", "-out", f"{name}.crt")
        made = subprocess.run([os.environ["DENOISED_BINARY"], "--make-token", "studio"], check=True,
                              capture_output=True, text=True).stdout
        token = next(word for word in made.replace("\n", " ").split(" ") if len(word) > 30)
        entry = made[made.index('"studio"'):]
        (self.folder / "clients.json").write_text("{" + entry + "}")
        (self.folder / "token").write_text(token + "\n")
        tls = ["--tls-cert", path("server.crt"), "--tls-key", path("server.key")]
        with support.serve(*tls, "--tls-client-ca", path("ca.crt")) as server:
            mutual = denoised.TLS(ca=path("ca.crt"), server_name="images.test", cert=path("studio.crt"),
                                  key=path("studio.key"))
            with denoised.Client(support.address(server), tls=mutual) as client:
                self.assertEqual(client.server_info(timeout=60).client, "studio")
        server = support.serve(*tls, "--clients", path("clients.json"))
        self.addCleanup(server.__exit__)
        address = support.address(server)
        trusting = denoised.TLS(ca=path("ca.crt"), server_name="images.test")

        def info(**options):
            with denoised.Client(address, retry=NEVER, **options) as client:
                return client.server_info(timeout=60)

        self.assertEqual(info(tls=trusting, token=token).client, "studio")
        self.assertEqual(info(tls=trusting, token_file=path("token")).client, "studio")
        self.raises(denoised.Unauthenticated, lambda: info(tls=trusting))
        self.raises(denoised.Unauthenticated, lambda: info(tls=trusting, token="x" * 43))
        self.raises(denoised.Unavailable, lambda: info(tls=True, token=token))  # unknown authority
        self.raises(denoised.Unavailable, lambda: info())  # plaintext

        async def main():
            async with denoised.AsyncClient(address, tls=trusting, token_file=path("token")) as client:
                return (await client.generate(labels=7, seed=1, steps=1))[0]
        self.assertEqual(asyncio.run(main()).bytes(),
                         self.client.generate(labels=7, seed=1, steps=1)[0].bytes())

        with denoised.Client(address, retry=NEVER, tls=trusting, token_file=path("token")) as client:
            (self.folder / "token").write_text("y" * 43)  # read again for each attempt
            self.raises(denoised.Unauthenticated, client.server_info)
            (self.folder / "token").write_text("two words")
            self.raises(denoised.InvalidArgument, client.server_info, "token_file")


if __name__ == "__main__":
    sys.exit(unittest.main())
