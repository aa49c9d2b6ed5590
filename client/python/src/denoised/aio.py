# SPDX-License-Identifier: Apache-2.0
"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import (Any, AsyncIterator, Awaitable, Callable, Dict, List, Optional, Sequence, Set,
                    Union)

import grpc
import grpc.aio

from denoised.health import health_pb2
from denoised.v1 import image_generation_pb2 as pb
from denoised.v1 import model_admin_pb2 as admin_pb

from . import _convert
from ._connection import (JOBS, METHODS, MODELS, ONCE, STREAMS, TLS, Connection, Headers, Metadata,
                          was_closed)
from ._stream import StreamState
from .errors import Cancelled, DenoisedError, FailedPrecondition, InvalidArgument
from .retry import Attempts, RetryPolicy
from .types import (Event, ImageFormat, Job, Model, NoiseSchedule, Previews, Priority, Result, Sampler,
                    ServerInfo)
from .client import InitImage, Labels, Size, Texts, Vectors, _serialize


async def _reply(call: Awaitable[Any]) -> Any:
    """As `await call`, but CancelledError says that the task was cancelled and nothing else. gRPC raises
    it for a call that this side ended, too."""
    future = asyncio.ensure_future(call)
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        future.cancel()
        raise
    if future.cancelled():
        raise was_closed()
    return future.result()


class AsyncStream(AsyncIterator[Event]):
    """The events of a job as they happen: iterate over it with `async for`, which starts it. A stream
    that breaks is retried with the same seed, and passes on only what is new. Leaving an `async with`
    block cancels it, and so does dropping it. Several tasks may read it: each event is for one of them."""

    def __init__(self, client: AsyncClient, state: StreamState,
                 prepare: Callable[[], Awaitable[None]]) -> None:
        self._client = client
        self._state = state
        self._prepare: Optional[Callable[[], Awaitable[None]]] = prepare  # None: done
        self._call: Any = None
        self._reading: Optional[asyncio.Lock] = None
        self._cancelled = False
        self._waiting: Optional[asyncio.Event] = None
        self._done = False
        self._error: Optional[DenoisedError] = None

    @property
    def request_id(self) -> str:
        """Empty until the first event is asked for, which sends the request, and until it comes if the
        server chose it."""
        return self._state.request_id

    def cancel(self) -> None:
        """Ends the call. The job ends too, unless it survives."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()
        if self._waiting is not None:
            self._waiting.set()

    async def result(self) -> Result:
        """Reads the rest of the events and returns all images that the stream has had: of a job that
        the server does not keep, a stream of `jobs.watch` may have only later ones."""
        async for _ in self:
            pass
        if self._error is not None:
            raise self._error
        return self._state.result()

    async def _start(self) -> Any:
        if self._prepare is not None:
            await self._prepare()
            self._prepare = None
        if self._cancelled:
            raise Cancelled("cancelled by the caller")
        method, request = self._state.call()
        # The call works on a copy: the state moves on while it runs.
        message = type(request).FromString(request.SerializeToString())
        headers = await self._client._with_token(self._state.headers)
        call = await self._client._method(method)
        if self._cancelled:  # while this waited for the token and the connection
            raise Cancelled("cancelled by the caller")
        self._call = call(message, timeout=self._state.attempts.remaining(), metadata=headers)
        self._client._streams.add(self._call)
        return self._call

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Event:
        if self._reading is None:  # here, because Python 3.9 ties it to the loop that it is made in
            self._reading = asyncio.Lock()
        async with self._reading:
            return await self._next()

    async def _next(self) -> Event:
        if self._done:
            raise StopAsyncIteration
        self._client._check_loop()
        try:
            while True:
                call = self._call or await self._start()
                error: Optional[DenoisedError] = None
                try:
                    while True:
                        message = await _reply(call.read())
                        if message is grpc.aio.EOF:
                            break
                        event = self._state.received(message)
                        if event is not None:
                            return event
                except grpc.RpcError as failure:
                    error = self._client._connection.error(failure, cancelled=self._cancelled)
                except Cancelled as ended:
                    error = ended
                except asyncio.CancelledError:  # gRPC has ended the call with the task
                    self.cancel()
                    raise
                if self._cancelled:
                    raise Cancelled("cancelled by the caller")
                delay = self._state.ended(error)
                if delay is None:
                    self._done = True
                    raise StopAsyncIteration
                self._call = None
                self._waiting = asyncio.Event()
                await self._client._pause(delay, self._waiting)
                self._waiting = None
        except DenoisedError as ended:
            self._done, self._error = True, ended
            raise

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # Newer releases of grpcio keep a call that nobody reads. Objects are collected on any thread.
        loop = self._client._loop
        if self._call is not None and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._call.cancel)


class AsyncJobs:
    """Jobs of the server. Only the server that accepted a job can report on it."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def get(self, request_id: str, *, timeout: Optional[float] = None) -> Job:
        """One that runs, or one that ended and is kept."""
        self._client._connection.check_single(JOBS)
        request = pb.GetJobRequest(request_id=request_id)
        return _convert.job((await self._client._call("GetJob", request, timeout)).job)

    async def list(self, *, all_clients: bool = False, limit: int = 100,
                   timeout: Optional[float] = None) -> List[Job]:
        """Those that run and those that are kept, the latest first; of all clients for admins."""
        self._client._connection.check_single(JOBS)
        if limit < 1:
            raise InvalidArgument(f"limit is {limit}; ask for at least one job")
        jobs: List[Job] = []
        request = pb.ListJobsRequest(all_clients=all_clients)
        attempts = self._client._connection.attempts(timeout)  # for the deadline of all pages
        while True:
            request.page_size = min(limit - len(jobs), 1000)
            page = await self._client._call("ListJobs", request, attempts.remaining())
            jobs += [_convert.job(job) for job in page.jobs]
            request.page_token = page.next_page_token
            if not request.page_token or len(jobs) >= limit:
                return jobs

    def watch(self, request_id: str, *, after: int = 0, timeout: Optional[float] = None,
              metadata: Optional[Metadata] = None, traceparent: Optional[str] = None) -> AsyncStream:
        """The events of a job after number `after` that the server keeps (every image, the latest
        place in the queue, progress and previews), then as they happen. A job with neither a
        request_id of the caller nor `survives` is not kept: what was sent to all who watched it,
        images too, is gone."""
        self._client._connection.check_single(JOBS)
        watch = _convert.watch_request(request_id, after)
        state = StreamState(self._client._connection.attempts(timeout), [], watch)

        async def prepare() -> None:
            state.headers = self._client._connection.headers(metadata, traceparent)

        return AsyncStream(self._client, state, prepare)

    async def cancel(self, request_id: str, *, timeout: Optional[float] = None) -> Job:
        """Ends a job before its next evaluation; returns it as it was just before."""
        self._client._connection.check_single(JOBS)
        request = pb.CancelJobRequest(request_id=request_id)
        return _convert.job((await self._client._call("CancelJob", request, timeout)).job)


class AsyncModels:
    """Models of the server. Changes are for admins and need one server, not replicas."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def list(self, *, timeout: Optional[float] = None) -> List[Model]:
        """All of them, in the order the server loaded them."""
        response = await self._client._call("ListModels", pb.ListModelsRequest(), timeout)
        return [_convert.model(model) for model in response.models]

    async def get(self, name: str = "", *, timeout: Optional[float] = None) -> Model:
        """One: name, name@version or alias; empty for the only one of the server."""
        request = pb.GetModelRequest(name=name)
        return _convert.model((await self._client._call("GetModel", request, timeout)).model)

    async def load(self, name: str, directory: str = "", *, version: str = "",
                   keep_current: bool = False, unload_previous: bool = False,
                   timeout: Optional[float] = None) -> Model:
        """Loads a version of a model and waits until it is ready; not retried. directory: on the
        server's disk; default: where the current version came from, read again. version: default:
        the number after the highest. keep_current: `name` goes on to mean the version that it means
        now. unload_previous: unload that one."""
        self._client._connection.check_single(MODELS)
        request = admin_pb.LoadModelRequest(name=name, directory=directory, version=version,
                                            keep_current=keep_current,
                                            unload_previous=unload_previous)
        response = await self._client._call("LoadModel", request, timeout, ONCE)
        return _convert.model(response.model)

    async def unload(self, name: str, *, timeout: Optional[float] = None) -> None:
        """Takes "name" or "name@version" away, and waits for the requests that it has; not retried."""
        self._client._connection.check_single(MODELS)
        await self._client._call("UnloadModel", admin_pb.UnloadModelRequest(name=name), timeout, ONCE)

    async def alias(self, alias: str, target: str, *, timeout: Optional[float] = None) -> Model:
        """`alias` means `target`, "name" or "name@version", from now on. With a model's own name as
        the alias, the version becomes its current one."""
        self._client._connection.check_single(MODELS)
        request = admin_pb.SetAliasRequest(alias=alias, target=target)
        return _convert.model((await self._client._call("SetAlias", request, timeout)).model)

    async def delete_alias(self, alias: str, *, timeout: Optional[float] = None) -> None:
        """Removes another name of a model; not retried."""
        self._client._connection.check_single(MODELS)
        await self._client._call("DeleteAlias", admin_pb.DeleteAliasRequest(alias=alias), timeout, ONCE)


class AsyncClient:
    """A client of a server, or of several that are the same, for one event loop. It connects with the
    first call. The arguments are those of `Client`."""

    def __init__(self, target: str = "127.0.0.1:50051", *, tls: Union[bool, TLS] = False,
                 token: Optional[str] = None, token_file: Optional[str] = None,
                 allow_plaintext_token: bool = False, retry: RetryPolicy = RetryPolicy(),
                 timeout: Optional[float] = None, metadata: Optional[Metadata] = None,
                 max_message_bytes: int = 256 << 20) -> None:
        self._connection = Connection(
            target, tls=(TLS() if tls else None) if isinstance(tls, bool) else tls,
            token=token, token_file=token_file, allow_plaintext_token=allow_plaintext_token,
            retry=retry, timeout=timeout, metadata=metadata,
            max_message_bytes=max_message_bytes)
        self._channel: Any = None
        self._loop: Optional[asyncio.AbstractEventLoop] = None  # of the channel
        self._methods: Dict[str, Callable[..., Any]] = {}
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()  # their calls
        self._pauses: Set[asyncio.Event] = set()
        self.jobs = AsyncJobs(self)
        self.models = AsyncModels(self)

    @property
    def target(self) -> str:
        """As given."""
        return self._connection.name

    async def close(self) -> None:
        """Ends the connection, and the calls of all tasks: they raise `Cancelled`."""
        self._connection.closed = True
        for call in list(self._streams):
            call.cancel()  # gRPC does not end streams with their channel
        for pause in self._pauses:
            pause.set()
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
            self, prompt: Optional[Texts] = None, *, model: Optional[str] = None,
            negative_prompt: Optional[Texts] = None, prompt_2: Optional[Texts] = None,
            negative_prompt_2: Optional[Texts] = None, clip_skip: Optional[int] = None,
            max_chunks: Optional[int] = None,
            labels: Optional[Labels] = None,
            class_vectors: Optional[Vectors] = None,
            original_size: Optional[Size] = None, crop: Optional[Sequence[int]] = None,
            target_size: Optional[Size] = None, count: Optional[int] = None,
            seed: Union[int, Sequence[int], None] = None, size: Optional[Size] = None,
            init_image: Optional[InitImage] = None, strength: Optional[float] = None,
            mask: Optional[InitImage] = None,
            initial_noise: Optional[Any] = None, steps: Optional[int] = None,
            sampler: Optional[Sampler] = None, noise_schedule: Optional[NoiseSchedule] = None,
            guidance_scale: Optional[float] = None,
            image_guidance_scale: Optional[float] = None,
            guidance_rescale: Optional[float] = None, guidance_start: Optional[float] = None,
            guidance_stop: Optional[float] = None, eta: Optional[float] = None,
            s_churn: Optional[float] = None, s_tmin: Optional[float] = None,
            s_tmax: Optional[float] = None, s_noise: Optional[float] = None,
            solver_order: Optional[int] = None, format: Optional[ImageFormat] = None,
            quality: Optional[int] = None, embed_metadata: Optional[bool] = None,
            priority: Optional[Priority] = None, request_id: Optional[str] = None,
            survives: bool = False, timings: bool = False, timeout: Optional[float] = None,
            metadata: Optional[Metadata] = None, traceparent: Optional[str] = None) -> Result:
        """As `Client.generate`. Cancelling the task cancels the request."""
        fields = _convert.fields_of(locals())
        attempts = self._connection.attempts(timeout)
        headers = self._connection.headers(metadata, traceparent)
        request = pb.GenerateRequest(params=await self._params(fields, attempts, headers))
        return _convert.result(await self._attempt("Generate", request, attempts, headers))

    def stream(
            self, prompt: Optional[Texts] = None, *, previews: Union[bool, Previews] = False,
            model: Optional[str] = None, negative_prompt: Optional[Texts] = None,
            prompt_2: Optional[Texts] = None, negative_prompt_2: Optional[Texts] = None,
            clip_skip: Optional[int] = None,
            max_chunks: Optional[int] = None, labels: Optional[Labels] = None,
            class_vectors: Optional[Vectors] = None,
            original_size: Optional[Size] = None, crop: Optional[Sequence[int]] = None,
            target_size: Optional[Size] = None, count: Optional[int] = None,
            seed: Union[int, Sequence[int], None] = None, size: Optional[Size] = None,
            init_image: Optional[InitImage] = None, strength: Optional[float] = None,
            mask: Optional[InitImage] = None,
            initial_noise: Optional[Any] = None, steps: Optional[int] = None,
            sampler: Optional[Sampler] = None, noise_schedule: Optional[NoiseSchedule] = None,
            guidance_scale: Optional[float] = None,
            image_guidance_scale: Optional[float] = None,
            guidance_rescale: Optional[float] = None, guidance_start: Optional[float] = None,
            guidance_stop: Optional[float] = None, eta: Optional[float] = None,
            s_churn: Optional[float] = None, s_tmin: Optional[float] = None,
            s_tmax: Optional[float] = None, s_noise: Optional[float] = None,
            solver_order: Optional[int] = None, format: Optional[ImageFormat] = None,
            quality: Optional[int] = None, embed_metadata: Optional[bool] = None,
            priority: Optional[Priority] = None, request_id: Optional[str] = None,
            survives: bool = False, timings: bool = False, timeout: Optional[float] = None,
            metadata: Optional[Metadata] = None, traceparent: Optional[str] = None) -> AsyncStream:
        """As `Client.stream`; the request is sent when the first event is asked for."""
        fields = _convert.fields_of(locals())
        state = StreamState(self._connection.attempts(timeout), [])

        async def prepare() -> None:
            state.headers = self._connection.headers(metadata, traceparent)
            state.generate = pb.StreamGenerateRequest(
                params=await self._params(fields, state.attempts, state.headers),
                preview=_convert.preview_options(previews))

        return AsyncStream(self, state, prepare)

    async def server_info(self, *, timeout: Optional[float] = None) -> ServerInfo:
        """What the server is and allows; of replicas, any."""
        return _convert.server_info(
            await self._call("GetServerInfo", pb.GetServerInfoRequest(), timeout))

    async def healthy(self, service: str = "", *, timeout: Optional[float] = None) -> bool:
        """Whether a service is SERVING; empty: the server as a whole. Without the restart_attempts of
        the client's policy: it tells soon that a server is gone."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = await self._call("Health", request, timeout, self._connection.retry_health)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    # What reads files or converts pictures runs on other threads: the loop must not wait for it.

    async def _with_token(self, headers: Headers) -> Headers:
        return await asyncio.to_thread(self._connection.with_token, headers)

    async def _params(self, fields: Dict[str, Any], attempts: Attempts,
                      headers: Headers) -> pb.GenerationParams:
        """The message of the arguments of `generate`, after a look at the model if classes have names."""
        if _convert.needs_names(fields["labels"]):
            model = await self._model_of_labels(fields["model"] or "", attempts, headers)
            fields["labels"] = _convert.label_indices(fields["labels"], model)
        return await asyncio.to_thread(_convert.generation_params, fields)

    async def _model_of_labels(self, name: str, attempts: Attempts, headers: Headers) -> Model:
        """The model called `name`, or else the only one that reads labels. Waits while it is loading, each second."""
        wait = _convert.LoadingWait(attempts)
        while True:
            with wait.asking():
                if name:
                    request = pb.GetModelRequest(name=name)
                    models = [(await self._attempt("GetModel", request, attempts, headers)).model]
                else:
                    models = (await self._attempt("ListModels", pb.ListModelsRequest(), attempts, headers)).models
            model = _convert.model_of_labels(name, models)
            if model.state != "loading":
                return model
            await self._pause(wait.delay(model), asyncio.Event())

    def _check_loop(self) -> None:
        if self._loop not in (None, asyncio.get_running_loop()):
            raise FailedPrecondition("the client is for the event loop of its first call, and this is another one; "
                                     "make a client in each asyncio.run()")

    async def _method(self, name: str) -> Callable[..., Any]:
        self._check_loop()
        credentials = None
        if self._channel is None:
            credentials = await asyncio.to_thread(self._connection.credentials)
        if self._connection.closed:
            raise was_closed()
        if self._channel is None:  # here, because a channel belongs to the loop it is made in
            self._connect(credentials)
        return self._methods[name]

    def _connect(self, credentials: Any) -> None:
        uri, options = self._connection.target.uri, self._connection.options
        self._loop = asyncio.get_running_loop()
        self._channel = (grpc.aio.insecure_channel(uri, options) if credentials is None
                         else grpc.aio.secure_channel(uri, credentials, options))
        for name, (path, reply) in METHODS.items():
            make = self._channel.unary_stream if name in STREAMS else self._channel.unary_unary
            self._methods[name] = make(path, request_serializer=_serialize,
                                       response_deserializer=reply.FromString)

    async def _call(self, name: str, request: Any, timeout: Optional[float],
                    retry: Optional[RetryPolicy] = None) -> Any:
        return await self._attempt(name, request, self._connection.attempts(timeout, retry),
                                   self._connection.headers(None, None))

    async def _attempt(self, name: str, request: Any, attempts: Attempts, headers: Headers) -> Any:
        while True:
            try:
                sent = await self._with_token(headers)
                method = await self._method(name)
                response = await _reply(method(request, timeout=attempts.remaining(), metadata=sent))
                attempts.succeeded()
                return response
            except grpc.RpcError as failure:
                error = self._connection.error(failure)
            delay = attempts.failed(error)
            if delay is None:
                raise error
            await self._pause(delay, asyncio.Event())

    async def _pause(self, seconds: float, end: asyncio.Event) -> None:
        """Waits before the next attempt, until `end` is set or the client is closed."""
        if self._connection.closed:
            return
        self._pauses.add(end)
        try:
            await asyncio.wait_for(end.wait(), seconds)
        except asyncio.TimeoutError:
            pass
        finally:
            self._pauses.discard(end)
