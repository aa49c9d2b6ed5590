#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How the Python client makes its calls and ends them, with a server in the test."""

import asyncio
import concurrent.futures
import gc
import pathlib
import sys
import tempfile
import threading
import time
import unittest

import support  # noqa: F401: first
import grpc

import denoised
from denoised._connection import METHODS, STREAMS
from denoised.v1 import image_generation_pb2 as pb

QUEUED = pb.StreamGenerateResponse(sequence=1, request_id="job", queued={})
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
            yield QUEUED
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

    def test_a_health_check_does_not_wait_for_a_restart(self):
        seen = []

        def info(request, context):
            return pb.GetServerInfoResponse()

        def health(request, context):
            seen.append("health")
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")

        address, attempts = self.serve(GetServerInfo=info, Health=health), denoised.RetryPolicy.max_attempts
        with denoised.Client(address, retry=FAST) as client:
            client.server_info()
            with self.assertRaises(denoised.Unavailable):
                client.healthy()
        self.assertEqual(len(seen), attempts)

        async def main():
            async with denoised.AsyncClient(address, retry=FAST) as client:
                await client.server_info()
                with self.assertRaises(denoised.Unavailable):
                    await client.healthy()

        asyncio.run(main())
        self.assertEqual(len(seen), 2 * attempts)

    def test_a_cancel_while_a_stream_connects(self):
        """Between the look at the cancel and the call, the loop runs other tasks."""
        def stream(request, context):
            yield QUEUED

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

    def test_a_stream_with_several_readers(self):
        calls = []

        def stream(request, context):
            calls.append("stream")
            for i in range(1, 200):
                yield pb.StreamGenerateResponse(sequence=i, request_id="job", progress={"evaluations_done": i})
            yield pb.StreamGenerateResponse(sequence=200, request_id="job", completed={})

        address = self.serve(StreamGenerate=stream)
        everything = list(range(1, 201))
        with denoised.Client(address) as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
            drawn = client.stream()
            readers = [pool.submit(lambda: [event.sequence for event in drawn]) for _ in range(4)]
            read = [reader.result(60) for reader in readers]
        self.assertEqual(sorted(sum(read, [])), everything)

        async def main():
            async with denoised.AsyncClient(address) as client:
                drawn = client.stream()

                async def sequences():
                    return [event.sequence async for event in drawn]

                read = await asyncio.gather(*(sequences() for _ in range(4)))
                self.assertEqual(sorted(sum(read, [])), everything)

        asyncio.run(main())
        self.assertEqual(len(calls), 2)

    def test_a_client_is_for_one_event_loop(self):
        def info(request, context):
            return pb.GetServerInfoResponse()

        def stream(request, context):
            yield QUEUED
            yield QUEUED

        client = denoised.AsyncClient(self.serve(GetServerInfo=info, StreamGenerate=stream), retry=FAST)
        drawn = client.stream()

        async def begin():
            await client.server_info()
            await drawn.__anext__()

        async def go_on():
            for call in (client.server_info, client.stream().result, drawn.__anext__):
                with self.assertRaisesRegex(denoised.FailedPrecondition, "make a client in each asyncio.run"):
                    await call()
            await client.close()

        asyncio.run(begin())
        asyncio.run(go_on())

    # Closing

    def serve_for_ever(self):
        """Calls that end when they are cancelled. Streams have one event before."""
        began, ended = [], []

        def wait(name, context):
            context.add_callback(lambda: ended.append(name))
            began.append(name)
            while context.is_active():
                time.sleep(0.01)

        def info(request, context):
            wait("info", context)
            return pb.GetServerInfoResponse()

        def stream(request, context):
            yield QUEUED
            wait("stream", context)

        return self.serve(GetServerInfo=info, StreamGenerate=stream), began, ended

    def wait_for(self, condition):
        give_up = time.monotonic() + 60
        while not condition():
            self.assertLess(time.monotonic(), give_up)
            time.sleep(0.01)

    def closed(self):
        return self.assertRaisesRegex(denoised.Cancelled, "the client was closed")

    def test_close_ends_calls_of_other_threads(self):
        address, began, ended = self.serve_for_ever()
        client = denoised.Client(address, retry=FAST)
        unread = client.stream()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            calls = [pool.submit(client.server_info), pool.submit(lambda: client.stream().result())]
            self.wait_for(lambda: len(began) == 3)
            client.close()
            for call in calls:
                with self.closed():
                    call.result(60)
        for call in (unread.result, client.server_info, client.stream, lambda: client.jobs.watch("job")):
            with self.closed():
                call()
        self.wait_for(lambda: len(ended) == 3)
        self.assertEqual(len(began), 3, "it was tried again")

    def test_close_ends_calls_of_other_tasks(self):
        address, began, ended = self.serve_for_ever()

        async def main():
            client = denoised.AsyncClient(address, retry=FAST)
            unread = client.stream()
            await unread.__anext__()
            tasks = [asyncio.ensure_future(client.server_info()), asyncio.ensure_future(client.stream().result())]
            cancelled = asyncio.ensure_future(client.server_info())
            while len(began) < 4:
                await asyncio.sleep(0.01)
            cancelled.cancel()
            await client.close()
            for task in tasks:
                with self.closed():
                    await asyncio.wait_for(task, 60)
            with self.assertRaises(asyncio.CancelledError):
                await cancelled
            await asyncio.to_thread(self.wait_for, lambda: len(ended) == 4)
            for call in (unread.result, client.server_info, client.stream().result, client.jobs.watch("job").result):
                with self.closed():
                    await asyncio.wait_for(call(), 60)

        asyncio.run(main())
        self.assertEqual(len(began), 4, "it was tried again")

    def test_a_stream_that_is_dropped_is_cancelled(self):
        ended = []

        def stream(request, context):
            context.add_callback(lambda: ended.append("stream"))
            yield QUEUED
            while context.is_active():
                time.sleep(0.01)

        address = self.serve(StreamGenerate=stream)

        async def leave(client):
            async for _ in client.stream():
                break

        async def fail(client):
            async for _ in client.stream():
                raise ArithmeticError

        async def wait(client, reached):
            async for _ in client.stream():
                reached.set()
                await asyncio.Event().wait()

        async def main():
            async with denoised.AsyncClient(address, retry=FAST) as client:
                await leave(client)
                with self.assertRaises(ArithmeticError):
                    await fail(client)
                reached = asyncio.Event()
                waiting = asyncio.ensure_future(wait(client, reached))
                await reached.wait()
                waiting.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await waiting
                del waiting
                gc.collect()
                await asyncio.to_thread(self.wait_for, lambda: len(ended) == 3)

        asyncio.run(main())

    def test_close_ends_pauses(self):
        arrived = threading.Semaphore(0)

        def info(request, context):
            arrived.release()
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")

        def stream(request, context):
            arrived.release()
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
            yield

        address = self.serve(GetServerInfo=info, StreamGenerate=stream)
        patient = denoised.RetryPolicy(initial_backoff=40, max_backoff=40)
        begin = time.monotonic()
        for call in (lambda client: client.server_info(), lambda client: client.stream().result()):
            client = denoised.Client(address, retry=patient)
            with concurrent.futures.ThreadPoolExecutor() as pool:
                running = pool.submit(call, client)
                arrived.acquire()
                self.wait_for(lambda: client._pauses._waiters)
                client.close()
                with self.closed():
                    running.result(60)

            async def main():
                client = denoised.AsyncClient(address, retry=patient)
                running = asyncio.ensure_future(call(client))
                await asyncio.to_thread(arrived.acquire)
                await asyncio.to_thread(self.wait_for, lambda: client._pauses)
                await client.close()
                with self.closed():
                    await asyncio.wait_for(running, 60)
            asyncio.run(main())
        self.assertLess(time.monotonic() - begin, 15)  # pauses take 20 s or more

    def test_a_stream_that_was_closed_after_its_last_event_has_its_result(self):
        def stream(request, context):
            yield pb.StreamGenerateResponse(sequence=1, request_id="job", completed={})
            while context.is_active():
                time.sleep(0.01)

        address = self.serve(StreamGenerate=stream)
        with denoised.Client(address) as client:
            drawn = client.stream()
            next(drawn)
        self.assertEqual(len(drawn.result()), 0)

        async def main():
            async with denoised.AsyncClient(address) as client:
                drawn = client.stream()
                await drawn.__anext__()
            self.assertEqual(len(await drawn.result()), 0)
        asyncio.run(main())

    def test_a_cancel_ends_the_pause_of_a_stream(self):
        arrived = threading.Semaphore(0)

        def stream(request, context):
            arrived.release()
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
            yield

        patient = denoised.RetryPolicy(initial_backoff=40, max_backoff=40)
        begin = time.monotonic()
        with denoised.Client(self.serve(StreamGenerate=stream), retry=patient) as client, \
                concurrent.futures.ThreadPoolExecutor() as pool:
            drawn = client.stream()
            running = pool.submit(drawn.result)
            arrived.acquire()
            self.wait_for(lambda: client._pauses._waiters)
            drawn.cancel()
            with self.assertRaisesRegex(denoised.Cancelled, "by the caller"):
                running.result(60)
        self.assertLess(time.monotonic() - begin, 15)  # pauses take 20 s or more


if __name__ == "__main__":
    sys.exit(unittest.main())
