#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How the Python client makes its calls and ends them, with a server in the test."""

import asyncio
import concurrent.futures
import pathlib
import sys
import tempfile
import unittest

import support  # noqa: F401: first
import grpc

import denoised
from denoised._connection import METHODS, STREAMS
from denoised.v1 import image_generation_pb2 as pb

FAST = denoised.RetryPolicy(initial_backoff=0.01)


class FakeServer:
    """Answers the calls of METHODS by functions of a request and its context, named as the methods."""

    def __init__(self, **answers):
        self.pool = concurrent.futures.ThreadPoolExecutor(8)
        self.server = grpc.server(self.pool)
        for name, answer in answers.items():
            service, method = METHODS[name][0][1:].split("/")
            make = (grpc.unary_stream_rpc_method_handler if name in STREAMS
                    else grpc.unary_unary_rpc_method_handler)
            handler = make(answer, response_serializer=lambda reply: reply.SerializeToString())
            self.server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def close(self):
        self.server.stop(0).wait()
        self.pool.shutdown()


class CallsTest(unittest.TestCase):
    def serve(self, **answers):
        server = FakeServer(**answers)
        self.addCleanup(server.close)
        return server.address

    def both(self, address, *calls, check, **options):
        """Makes the calls in order, then `check`: with a Client, then with an AsyncClient."""
        with self.subTest("sync"):
            with denoised.Client(address, retry=FAST, **options) as client:
                for call in calls:
                    call(client)
            check()

        async def main():
            async with denoised.AsyncClient(address, retry=FAST, **options) as client:
                for call in calls:
                    await call(client)
        with self.subTest("async"):
            asyncio.run(main())
            check()

    def test_every_attempt_reads_the_token_file(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = pathlib.Path(folder.name) / "token"
        seen = []

        def see(context):
            """The first attempt of two finds that its token was replaced meanwhile."""
            seen.append(dict(context.invocation_metadata())["authorization"])
            path.write_text(f"token-{len(seen)}")
            if len(seen) % 2 == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "away")

        def info(request, context):
            see(context)
            return pb.GetServerInfoResponse()

        def stream(request, context):
            yield pb.StreamGenerateResponse(sequence=1, request_id="job", queued={})
            see(context)
            yield pb.StreamGenerateResponse(sequence=2, request_id="job", completed={})

        def check():
            self.assertEqual(seen, [f"Bearer token-{i}" for i in range(6)])
            seen.clear()
            path.write_text("token-0")

        path.write_text("token-0")
        self.both(self.serve(GetServerInfo=info, StreamGenerate=stream, WatchJob=stream),
                  lambda client: client.server_info(), lambda client: client.stream().result(),
                  lambda client: client.jobs.watch("job").result(), check=check,
                  token_file=str(path), allow_plaintext_token=True)

    def test_a_cancel_while_a_stream_connects(self):
        """Between the look at the cancel and the call, the loop runs other tasks."""
        def stream(request, context):
            yield pb.StreamGenerateResponse(sequence=1, request_id="job", queued={})

        async def main():
            async with denoised.AsyncClient(self.serve(StreamGenerate=stream), retry=FAST) as client:
                drawn, method = client.stream(), client._method

                async def connect(name):
                    drawn.cancel()
                    return await method(name)

                client._method = connect
                with self.assertRaisesRegex(denoised.Cancelled, "by the caller"):
                    await asyncio.wait_for(drawn.__anext__(), 60)

        asyncio.run(main())


if __name__ == "__main__":
    sys.exit(unittest.main())
