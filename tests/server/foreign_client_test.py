#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A client in another language against a real server process, knowing nothing but the name of the
service: message types come from the server's reflection.

  foreign_client_test.py --address 127.0.0.1:50051
  foreign_client_test.py --binary build/dev/server/denoised --model models/mnist-32
"""

import argparse
import struct
import sys
import time
import unittest
import urllib.request

try:
    import grpc
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ImportError as error:
    print(f"skipped: {error}; install python3-grpcio and python3-protobuf")
    sys.exit(77)

from running import Running

SERVICE = "denoised.v1.ImageGeneration"
INFERENCE = "inference.GRPCInferenceService"  # the Open Inference Protocol
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def message_class(descriptor):
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(descriptor.file.pool).GetPrototype(descriptor)


def reflection_classes():
    """grpc.reflection.v1alpha, as far as it is used: the one type a client must bring along."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="reflection.proto", package="grpc.reflection.v1alpha", syntax="proto3")

    def message(name, *fields):
        added = file.message_type.add(name=name)
        for number, field_name, kind, repeated in fields:
            is_message = isinstance(kind, str)
            added.field.add(
                name=field_name, number=number,
                label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL,
                type=field.TYPE_MESSAGE if is_message else kind,
                type_name=f".grpc.reflection.v1alpha.{kind}" if is_message else None)

    message("ServerReflectionRequest", (4, "file_containing_symbol", field.TYPE_STRING, False),
            (3, "file_by_filename", field.TYPE_STRING, False),
            (7, "list_services", field.TYPE_STRING, False))
    message("ServiceResponse", (1, "name", field.TYPE_STRING, False))
    message("ListServiceResponse", (1, "service", "ServiceResponse", True))
    message("FileDescriptorResponse", (1, "file_descriptor_proto", field.TYPE_BYTES, True))
    message("ErrorResponse", (1, "error_code", field.TYPE_INT32, False),
            (2, "error_message", field.TYPE_STRING, False))
    message("ServerReflectionResponse",
            (4, "file_descriptor_response", "FileDescriptorResponse", False),
            (6, "list_services_response", "ListServiceResponse", False),
            (7, "error_response", "ErrorResponse", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [message_class(pool.FindMessageTypeByName(f"grpc.reflection.v1alpha.{name}"))
            for name in ("ServerReflectionRequest", "ServerReflectionResponse")]


class Reflection:
    """Everything that the server says about its own interface."""

    def __init__(self, channel):
        self.request, response = reflection_classes()
        self.call = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=self.request.SerializeToString,
            response_deserializer=response.FromString)
        self.pool = descriptor_pool.DescriptorPool()
        self.added = set()

    def ask(self, **question):
        # An empty list_services must still be on the wire, and proto3 would leave it out.
        request = self.request(**question)
        answer = next(iter(self.call(iter([request]), timeout=60)))
        if answer.error_response.error_code:
            raise LookupError(answer.error_response.error_message)
        return answer

    def services(self):
        return [s.name for s in self.ask(list_services="*").list_services_response.service]

    def add(self, **question):
        files = {}
        for data in self.ask(**question).file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            files[file.name] = file
        for file in files.values():
            for dependency in file.dependency:
                if dependency not in self.added and dependency not in files:
                    self.add(file_by_filename=dependency)
        waiting = [f for f in files.values() if f.name not in self.added]
        while waiting:
            ready = [f for f in waiting if all(d in self.added for d in f.dependency)]
            assert ready, f"circular or missing dependencies: {[f.name for f in waiting]}"
            for file in ready:
                self.pool.Add(file)
                self.added.add(file.name)
            waiting = [f for f in waiting if f.name not in self.added]

    def message(self, name):
        try:
            descriptor = self.pool.FindMessageTypeByName(name)
        except KeyError:
            self.add(file_containing_symbol=name)
            descriptor = self.pool.FindMessageTypeByName(name)
        return message_class(descriptor)


class Client:
    def __init__(self, address):
        self.channel = grpc.insecure_channel(address, options=OPTIONS)
        grpc.channel_ready_future(self.channel).result(timeout=30)
        self.reflection = Reflection(self.channel)
        self.methods = self.methods_of(SERVICE)
        self.inference = self.methods_of(INFERENCE)

    def methods_of(self, name):
        self.reflection.add(file_containing_symbol=name)
        service = self.reflection.pool.FindServiceByName(name)
        proto = descriptor_pb2.ServiceDescriptorProto()
        service.CopyToProto(proto)
        methods = {}
        for method, described in zip(service.methods, proto.method):
            kind = self.channel.unary_stream if described.server_streaming else self.channel.unary_unary
            methods[method.name] = kind(
                f"/{name}/{method.name}",
                request_serializer=message_class(method.input_type).SerializeToString,
                response_deserializer=message_class(method.output_type).FromString)
        return methods

    def type(self, name):
        return self.reflection.message(f"denoised.v1.{name}")

    def enum(self, name):
        return self.reflection.pool.FindEnumTypeByName(f"denoised.v1.{name}").values_by_name

    def params(self, **fields):
        fields.setdefault("model", MODEL.name)
        return self.type("GenerationParams")(**fields)

    def generate(self, timeout=600, **fields):
        request = self.type("GenerateRequest")(params=self.params(**fields))
        return self.methods["Generate"](request, timeout=timeout)

    def stream(self, preview=None, timeout=600, **fields):
        request = self.type("StreamGenerateRequest")(params=self.params(**fields), preview=preview)
        return self.methods["StreamGenerate"](request, timeout=timeout)

    def infer(self, inputs, outputs=(), **fields):
        """ModelInfer with (name, datatype, shape, raw bytes) for each input."""
        request = self.reflection.message("inference.ModelInferRequest")(**fields)
        for name, datatype, shape, raw in inputs:
            request.inputs.add(name=name, datatype=datatype, shape=shape)
            request.raw_input_contents.append(raw)
        for name in outputs:
            request.outputs.add(name=name)
        return self.inference["ModelInfer"](request, timeout=600)

    def health(self, service=""):
        """grpc.health.v1 on the wire: 1 is SERVING."""
        check = self.channel.unary_unary("/grpc.health.v1.Health/Check",
                                         request_serializer=None, response_deserializer=None)
        request = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
        answer = check(request, timeout=60)
        return answer[1] if answer else 0

    def details(self, error):
        """The google.rpc details of an error by the short names of their types."""
        found = {}
        for key, value in error.trailing_metadata():
            if key != "grpc-status-details-bin":
                continue
            status = self.reflection.message("google.rpc.Status").FromString(value)
            for detail in status.details:
                name = detail.type_url.split("/")[-1]
                found[name.split(".")[-1]] = self.reflection.message(name).FromString(detail.value)
        return found


CLIENT = None   # type: Client
MODEL = None    # the model under test, as GetModel tells it
METRICS = None  # URL, when this script started the server


class ForeignClientTest(unittest.TestCase):
    def error(self, call, code):
        with self.assertRaises(grpc.RpcError) as caught:
            result = call()
            list(result) if hasattr(result, "__next__") else result
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        return caught.exception

    def violations(self, call):
        error = self.error(call, grpc.StatusCode.INVALID_ARGUMENT)
        details = CLIENT.details(error)
        self.assertEqual(details["ErrorInfo"].reason, "INVALID_FIELDS")
        self.assertEqual(details["ErrorInfo"].domain, "denoised")
        for violation in details["BadRequest"].field_violations:
            self.assertTrue(violation.description)
        return [v.field for v in details["BadRequest"].field_violations]

    def long_job(self):
        """Fields of a request that no engine finishes while a test waits."""
        return {"steps": MODEL.limits.max_steps, "count": MODEL.limits.max_count}

    def assert_rising(self, events):
        """Sequence numbers rise; those of what was replaced before it was sent are missing."""
        numbers = [event.sequence for event in events]
        self.assertEqual(numbers, sorted(set(numbers)))
        self.assertEqual(numbers[0], 1)

    def test_reflection_lists_everything(self):
        services = CLIENT.reflection.services()
        for name in (SERVICE, INFERENCE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"):
            self.assertIn(name, services)
        self.assertEqual(set(CLIENT.methods),
                         {"Generate", "StreamGenerate", "GetJob", "ListJobs", "WatchJob",
                          "CancelJob", "ListModels", "GetModel", "GetServerInfo"})

    def test_health(self):
        for service in ("", "liveness", SERVICE, INFERENCE):
            self.assertEqual(CLIENT.health(service), 1, service)
        self.error(lambda: CLIENT.health("nobody"), grpc.StatusCode.NOT_FOUND)

    def test_models(self):
        self.assertTrue(MODEL.architecture)
        self.assertGreaterEqual(MODEL.limits.max_steps, MODEL.defaults.steps)
        self.assertGreater(MODEL.parameters, 0)
        self.assertIn(MODEL.defaults.sampler, MODEL.samplers)
        self.assertIn(MODEL.defaults.noise_schedule, MODEL.noise_schedules)
        listed = CLIENT.methods["ListModels"](CLIENT.type("ListModelsRequest")(), timeout=60)
        self.assertIn(MODEL.name, [m.name for m in listed.models])

    def test_unknown_model(self):
        error = self.error(lambda: CLIENT.generate(model="no-such-model"), grpc.StatusCode.NOT_FOUND)
        self.assertEqual(CLIENT.details(error)["ErrorInfo"].reason, "MODEL_NOT_FOUND")
        self.assertIn(MODEL.name, error.details())
        get = lambda: CLIENT.methods["GetModel"](CLIENT.type("GetModelRequest")(name="x"), timeout=60)
        self.error(get, grpc.StatusCode.NOT_FOUND)

    def test_generate(self):
        reply = CLIENT.generate(seed=5, count=2, steps=3, request_id="foreign")
        self.assertEqual(reply.params.request_id, "foreign")
        self.assertEqual((reply.params.seed, reply.params.steps), (5, 3))
        self.assertEqual([i.index for i in reply.images], [0, 1])
        self.assertEqual([i.seed for i in reply.images], [5, 6])
        for image in reply.images:
            self.assertEqual(image.mime_type, "image/png")
            self.assertTrue(image.encoded.startswith(b"\x89PNG\r\n\x1a\n"))
            width, height = struct.unpack(">II", image.encoded[16:24])
            self.assertEqual((width, height), (MODEL.defaults.width, MODEL.defaults.height))
            self.assertIn(b"tEXtseed\0" + str(image.seed).encode(), image.encoded)
            self.assertIn(b"tEXtsteps\0" + b"3", image.encoded)
        self.assertGreater(reply.timing.total_seconds, 0)

    def test_same_seed_same_bytes(self):
        format = CLIENT.enum("ImageFormat")["IMAGE_FORMAT_RAW_FLOAT32"].number
        fields = {"steps": 2, "output": {"format": format}}
        if MODEL.limits.num_classes:
            fields["conditions"] = [{"class_label": 1}]
        many = CLIENT.generate(seed=2**64 - 1, count=3, **fields).images
        alone = CLIENT.generate(seed=many[2].seed, **fields).images
        self.assertEqual(many[2].seed, 1)
        self.assertEqual(many[2].tensor.data, alone[0].tensor.data)
        self.assertNotEqual(many[0].tensor.data, many[1].tensor.data)

    def test_formats(self):
        magic = {"JPEG": b"\xff\xd8\xff", "WEBP": b"RIFF"}
        for name, start in magic.items():
            number = CLIENT.enum("ImageFormat")[f"IMAGE_FORMAT_{name}"].number
            image = CLIENT.generate(steps=1, output={"format": number, "quality": 80}).images[0]
            self.assertTrue(image.encoded.startswith(start), name)
        number = CLIENT.enum("ImageFormat")["IMAGE_FORMAT_RAW_UINT8"].number
        tensor = CLIENT.generate(steps=1, output={"format": number}).images[0].tensor
        shape = [MODEL.defaults.height, MODEL.defaults.width, MODEL.limits.channels]
        self.assertEqual(list(tensor.shape), shape)
        self.assertEqual(len(tensor.data), shape[0] * shape[1] * shape[2])

    def test_image_to_image(self):
        picture = CLIENT.generate(steps=1).images[0].encoded
        reply = CLIENT.generate(steps=4, init_image={"encoded": picture, "strength": 0.5})
        self.assertEqual(reply.params.init_image.strength, 0.5)
        self.assertEqual(len(reply.images), 1)

    def test_open_inference_protocol(self):
        ready = CLIENT.reflection.message("inference.ModelReadyRequest")(name=MODEL.name)
        self.assertTrue(CLIENT.inference["ModelReady"](ready, timeout=60).ready)
        asked = CLIENT.reflection.message("inference.ModelMetadataRequest")(name=MODEL.name)
        metadata = CLIENT.inference["ModelMetadata"](asked, timeout=60)
        self.assertIn("seed", [tensor.name for tensor in metadata.inputs])
        inputs = [("seed", "UINT64", [2], struct.pack("<2Q", 2**64 - 1, 5)),
                  ("steps", "INT32", [1], struct.pack("<i", 2))]
        reply = CLIENT.infer(inputs, ["image", "seed"], model_name=MODEL.name, id="mine")
        self.assertEqual((reply.id, reply.model_name), ("mine", MODEL.name))
        height, width = MODEL.defaults.height, MODEL.defaults.width
        self.assertEqual(list(reply.outputs[0].shape), [2, height, width, MODEL.limits.channels])
        self.assertEqual(struct.unpack("<2Q", reply.raw_output_contents[1]), (2**64 - 1, 5))
        self.assertEqual(len(reply.raw_output_contents[0]), 2 * height * width * MODEL.limits.channels)
        error = self.error(lambda: CLIENT.infer([("prompt", "BYTES", [1], b"\1\0\0\0x")]),
                           grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("use seed", error.details())

    def test_triton_extensions(self):
        message = lambda kind, /, **fields: CLIENT.reflection.message(f"inference.{kind}")(**fields)
        index = CLIENT.inference["RepositoryIndex"](message("RepositoryIndexRequest"), timeout=60)
        self.assertIn((MODEL.name, "READY"), [(m.name, m.state) for m in index.models])
        asked = message("ModelConfigRequest", name=MODEL.name)
        config = CLIENT.inference["ModelConfig"](asked, timeout=60).config
        self.assertIn("seed", [tensor.name for tensor in config.input])
        self.assertTrue(all(tensor.optional and tensor.data_type for tensor in config.input))
        asked = message("ModelStatisticsRequest", name=MODEL.name)
        count = lambda: CLIENT.inference["ModelStatistics"](
            asked, timeout=60).model_stats[0].inference_stats.success.count
        before = count()
        CLIENT.infer([("steps", "INT32", [1], struct.pack("<i", 1))], model_name=MODEL.name)
        self.assertEqual(count(), before + 1)
        load = message("RepositoryModelLoadRequest", model_name="no-such-model")
        self.error(lambda: CLIENT.inference["RepositoryModelLoad"](load, timeout=60),
                   grpc.StatusCode.NOT_FOUND)

    def test_stream(self):
        # A preview that is not sent before its image is there never is. A busy machine is given more time.
        kinds, steps = [], 8
        while "preview" not in kinds and steps <= MODEL.limits.max_steps:
            events = list(CLIENT.stream(preview={"every_evaluations": 1}, count=2, steps=steps,
                                        request_id=f"story of {steps}"))
            kinds = [e.WhichOneof("event") for e in events]
            self.assert_rising(events)
            self.assertEqual({e.request_id for e in events}, {f"story of {steps}"})
            self.assertEqual(kinds[:2], ["queued", "started"])
            self.assertEqual(kinds[-1], "completed")
            self.assertEqual(kinds.count("image"), 2)
            self.assertIn("progress", kinds)
            steps *= 4
        self.assertIn("preview", kinds)
        done = [e.progress.evaluations_done for e in events if e.WhichOneof("event") == "progress"]
        self.assertEqual(done, sorted(set(done)))
        last = events[-1].completed
        self.assertEqual(done[-1], last.run.evaluations * last.params.count)

    def test_cancel(self):
        call = CLIENT.stream(timeout=None, **self.long_job())  # one that it cannot meet is refused
        self.assertEqual(next(call).WhichOneof("event"), "queued")
        call.cancel()
        self.error(lambda: list(call), grpc.StatusCode.CANCELLED)
        # The device is free again: a small request is not stuck behind the long one.
        CLIENT.generate(steps=1, timeout=60)

    def test_deadline(self):
        begin = time.monotonic()
        self.error(lambda: CLIENT.generate(timeout=0.2, **self.long_job()),
                   grpc.StatusCode.DEADLINE_EXCEEDED)
        self.error(lambda: CLIENT.stream(timeout=0.2, **self.long_job()),
                   grpc.StatusCode.DEADLINE_EXCEEDED)
        self.assertLess(time.monotonic() - begin, 60)
        CLIENT.generate(steps=1, timeout=60)

    def test_bad_requests_of_every_kind(self):
        nan, infinity = float("nan"), float("inf")
        limits = MODEL.limits
        cases = [
            ("params.request_id", {"request_id": "two\nlines"}),
            ("params.request_id", {"request_id": "x" * 129}),
            ("params.count", {"count": 0}),
            ("params.count", {"count": -(2**31)}),
            ("params.count", {"count": limits.max_count + 1, "steps": 1}),
            ("params.steps", {"steps": 0}),
            ("params.steps", {"steps": limits.max_steps + 1}),
            ("params.guidance_scale", {"guidance_scale": nan}),
            ("params.guidance_scale", {"guidance_scale": -1}),
            ("params.guidance_scale", {"guidance_scale": infinity}),
            ("params.sampler", {"sampler": 1234}),
            ("params.noise_schedule", {"noise_schedule": 1234}),
            ("params.eta", {"eta": 2}),
            ("params.s_churn", {"s_churn": -1}),
            ("params.s_tmin", {"s_tmin": nan}),
            ("params.s_tmax", {"s_tmax": -1}),
            ("params.s_noise", {"s_noise": 0}),
            ("params.solver_order", {"solver_order": 4}),
            ("params.width", {"width": 0}),
            ("params.width", {"width": 2**31 - 1}),
            ("params.height", {"height": -1}),
            ("params.output.format", {"output": {"format": 99}}),
            ("params.output.quality", {"output": {"quality": 101}}),
            ("params.initial_noise.shape", {"initial_noise": {"shape": [1, 2, 3, 4, 5, 6, 7]}}),
            ("params.init_image", {"init_image": {}}),
            ("params.init_image.encoded", {"init_image": {"encoded": b"\x89PNG\r\n\x1a\nrubbish"}}),
            ("params.init_image.encoded", {"init_image": {"encoded": b"\xff\xd8\xff\xe0"}}),
            ("params.init_image.tensor.shape",
             {"init_image": {"tensor": {"data_type": 1, "shape": [2**62, 2**62, limits.channels]}}}),
            ("params.conditions[0]", {"conditions": [{}]}),
        ]
        if limits.num_classes:
            cases += [
                ("params.conditions[0].class_label", {"conditions": [{"class_label": limits.num_classes}]}),
                ("params.conditions[0].class_label", {"conditions": [{"class_label": -(2**31)}]}),
            ]
        if limits.size_multiple > 1:
            cases.append(("params.width", {"width": limits.size_multiple + 1}))
        for field, fields in cases:
            with self.subTest(fields=str(fields)[:80]):
                self.assertIn(field, self.violations(lambda: CLIENT.generate(**fields)))
                self.assertIn(field, self.violations(lambda: CLIENT.stream(**fields)))
        for field, preview in [("preview.kind", {"kind": 9}),
                               ("preview.every_evaluations", {"every_evaluations": 0}),
                               ("preview.max_edge", {"max_edge": -5}),
                               ("preview.format", {"format": 9})]:
            with self.subTest(preview=preview):
                self.assertIn(field, self.violations(lambda: CLIENT.stream(preview=preview)))

    def test_all_violations_at_once(self):
        fields = self.violations(lambda: CLIENT.generate(
            count=0, steps=-1, eta=float("nan"), output={"quality": 0}, sampler=500))
        self.assertEqual(sorted(fields), ["params.count", "params.eta", "params.output.quality",
                                          "params.sampler", "params.steps"])

    def test_a_flood_of_violations_still_arrives(self):
        if not MODEL.limits.num_classes:
            self.skipTest("the model has no labels")
        fields = self.violations(lambda: CLIENT.generate(
            count=MODEL.limits.max_count, conditions=[{"class_label": -1}] * 20000))
        self.assertGreater(len(fields), 3)

    def test_oversize_request(self):
        picture = b"x" * (MODEL.limits.max_request_bytes + 1)
        self.error(lambda: CLIENT.generate(init_image={"encoded": picture}),
                   grpc.StatusCode.RESOURCE_EXHAUSTED)
        CLIENT.generate(steps=1)

    def test_garbage_on_the_wire(self):
        for method in ("Generate", "StreamGenerate", "NoSuchMethod"):
            make = (CLIENT.channel.unary_stream if method == "StreamGenerate"
                    else CLIENT.channel.unary_unary)
            call = make(f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None)
            with self.assertRaises(grpc.RpcError):
                list(call(b"\xff\xff\xff\xff\x0f", timeout=60))
        CLIENT.generate(steps=1)

    def test_two_hundred_concurrent_streams(self):
        calls = [CLIENT.stream(seed=i, count=1, steps=2, preview={}) for i in range(200)]
        for i, call in enumerate(calls):
            events = list(call)
            images = [e.image.image for e in events if e.WhichOneof("event") == "image"]
            self.assertEqual([image.seed for image in images], [i])
            self.assert_rising(events)
            self.assertEqual(events[-1].WhichOneof("event"), "completed")

    def test_full_queue(self):
        if METRICS is None:
            self.skipTest("only against a server that this script started with a short queue")
        calls, full = [], None
        for _ in range(100):
            call = CLIENT.stream(timeout=None, **self.long_job())
            calls.append(call)
            try:
                next(call)
            except grpc.RpcError as error:
                full = error
                break
        for call in calls:
            call.cancel()
        self.assertIsNotNone(full, "the queue never filled")
        self.assertEqual(full.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, full.details())
        details = CLIENT.details(full)
        self.assertEqual(details["ErrorInfo"].reason, "QUEUE_FULL")
        delay = details["RetryInfo"].retry_delay
        self.assertGreater(delay.seconds + delay.nanos, 0)
        # A cancel travels without an answer, so the queue frees some time after it was sent.
        self.generate_once_there_is_room(within_seconds=60)

    def generate_once_there_is_room(self, within_seconds):
        give_up = time.monotonic() + within_seconds
        while True:
            try:
                return CLIENT.generate(steps=1)
            except grpc.RpcError as error:
                if (error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED
                        or time.monotonic() > give_up):
                    raise
                delay = CLIENT.details(error)["RetryInfo"].retry_delay
                time.sleep(delay.seconds + delay.nanos / 1e9)

    def test_metrics(self):
        if METRICS is None:
            self.skipTest("only against a server that this script started")
        CLIENT.generate(steps=1)
        end = time.monotonic() + 60
        while True:  # the call is counted after its reply is sent
            text = urllib.request.urlopen(METRICS, timeout=60).read().decode()
            if "\ngrpc_server_handled_total" in text or time.monotonic() > end:
                break
            time.sleep(0.02)
        for name in ("grpc_server_started_total", "grpc_server_handled_total",
                     "grpc_server_handling_seconds_bucket", "denoised_images_total",
                     "denoised_evaluation_rows_bucket", "denoised_queued_images",
                     "denoised_model_state", "denoised_build_info", "denoised_startup_seconds"):
            self.assertIn("\n" + name, text)


def run(address, model_name, arguments):
    global CLIENT, MODEL
    CLIENT = Client(address)
    request = CLIENT.type("GetModelRequest")(name=model_name)
    MODEL = CLIENT.methods["GetModel"](request, timeout=60).model
    result = unittest.main(argv=[sys.argv[0]] + arguments, verbosity=2, exit=False).result
    CLIENT.channel.close()
    return result.wasSuccessful() and result.testsRun > 0


def main():
    global METRICS
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of a running server")
    parser.add_argument("--model-name", default="", help="with --address, when it holds several")
    parser.add_argument("--binary", help="the denoised executable to start")
    parser.add_argument("--model", help="model directory for --binary")
    options, rest = parser.parse_known_args()
    if options.address:
        return 0 if run(options.address, options.model_name, rest) else 1
    if not (options.binary and options.model):
        parser.error("give --address, or --binary and --model")
    with Running(options.binary, "--model", f"under-test={options.model}", "--max-queued-images",
                 "2048", "--grace-seconds", "5", metrics_listen="127.0.0.1:0") as server:
        server.wait_for("serving", seconds=120)
        listening = server.wait_for("listening")
        METRICS = listening["metrics"]
        succeeded = run(listening["address"], "", rest)
        server.process.terminate()
        if server.process.wait(60) != 0:
            raise RuntimeError(f"the server ended with {server.process.returncode}:\n" +
                               "".join(server.lines[-20:]))
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
