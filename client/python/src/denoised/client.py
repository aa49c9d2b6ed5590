# SPDX-License-Identifier: Apache-2.0
"""The client for programs with threads."""

from __future__ import annotations

import os
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import grpc

from denoised.health import health_pb2
from denoised.v1 import image_generation_pb2 as pb
from denoised.v1 import model_admin_pb2 as admin_pb

from . import _convert
from ._connection import (JOBS, METHODS, MODELS, ONCE, STREAMS, TLS, Connection, Headers, Metadata,
                          was_closed)
from ._stream import StreamState
from .errors import Cancelled, DenoisedError, InvalidArgument
from .retry import Attempts, RetryPolicy
from .types import (Event, ImageFormat, Job, Model, NoiseSchedule, Previews, Priority, Result, Sampler,
                    ServerInfo)

Texts = Union[str, Sequence[str]]
Labels = Union[int, str, Sequence[Union[int, str]]]
Vectors = Union[float, Sequence[Union[float, Sequence[float]]]]
Size = Union[int, Tuple[int, int]]
InitImage = Union[bytes, str, "os.PathLike[str]", Any]


class Stream(Iterator[Event]):
    """The events of a job as they happen: iterate over it. A stream that breaks is retried with the
    same seed, and passes on only what is new. Leaving a `with` block cancels it. Several threads may
    read it: each event is for one of them."""

    def __init__(self, client: Client, state: StreamState) -> None:
        self._client = client
        self._state = state
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._cancelled = threading.Event()
        self._call: Any = None
        self._done = False
        self._error: Optional[DenoisedError] = None
        self._start()

    @property
    def request_id(self) -> str:
        """Empty until the first event if the server chose it."""
        return self._state.request_id

    def cancel(self) -> None:
        """Ends the call, from any thread. The job ends too, unless it survives."""
        self._cancelled.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()
        self._client._end_pauses()

    def result(self) -> Result:
        """Reads the rest of the events and returns all images that the stream has had: of a job that
        the server does not keep, a stream of `jobs.watch` may have only later ones."""
        for _ in self:
            pass
        if self._error is not None:
            raise self._error
        return self._state.result()

    def _start(self) -> None:
        method, request = self._state.call()
        headers = self._client._connection.with_token(self._state.headers)
        with self._lock:
            if self._cancelled.is_set():
                return
            # The call works on a copy: the state moves on while it runs.
            message = type(request).FromString(request.SerializeToString())
            self._call = self._client._begin(method, message, self._state.attempts, headers)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        with self._reading:
            return self._next()

    def _next(self) -> Event:
        if self._done:
            raise StopIteration
        try:
            while True:
                error: Optional[DenoisedError] = None
                try:
                    if self._cancelled.is_set():
                        raise Cancelled("cancelled by the caller")
                    for message in self._call:
                        event = self._state.received(message)
                        if event is not None:
                            return event
                except grpc.RpcError as failure:
                    if self._cancelled.is_set():
                        raise Cancelled("cancelled by the caller") from None
                    error = self._client._connection.error(failure)
                delay = self._state.ended(error)
                if delay is None:
                    self._done = True
                    raise StopIteration
                self._client._pause(delay, self._cancelled.is_set)
                if self._cancelled.is_set():
                    raise Cancelled("cancelled by the caller")
                self._start()
        except DenoisedError as ended:
            self._done, self._error = True, ended
            raise

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Jobs:
    """Jobs of the server. Only the server that accepted a job can report on it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def get(self, request_id: str, *, timeout: Optional[float] = None) -> Job:
        """One that runs, or one that ended and is kept."""
        self._client._connection.check_single(JOBS)
        request = pb.GetJobRequest(request_id=request_id)
        return _convert.job((self._client._call("GetJob", request, timeout)).job)

    def list(self, *, all_clients: bool = False, limit: int = 100,
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
            page = self._client._call("ListJobs", request, attempts.remaining())
            jobs += [_convert.job(job) for job in page.jobs]
            request.page_token = page.next_page_token
            if not request.page_token or len(jobs) >= limit:
                return jobs

    def watch(self, request_id: str, *, after: int = 0, timeout: Optional[float] = None,
              metadata: Optional[Metadata] = None, traceparent: Optional[str] = None) -> Stream:
        """The events of a job after number `after` that the server keeps (every image, the latest
        place in the queue, progress and previews), then as they happen. A job with neither a
        request_id of the caller nor `survives` is not kept: what was sent to all who watched it,
        images too, is gone."""
        self._client._connection.check_single(JOBS)
        watch = _convert.watch_request(request_id, after)
        return Stream(self._client, self._client._stream_state(watch, timeout, metadata, traceparent))

    def cancel(self, request_id: str, *, timeout: Optional[float] = None) -> Job:
        """Ends a job before its next evaluation; returns it as it was just before."""
        self._client._connection.check_single(JOBS)
        request = pb.CancelJobRequest(request_id=request_id)
        return _convert.job((self._client._call("CancelJob", request, timeout)).job)


class Models:
    """Models of the server. Changes are for admins and need one server, not replicas."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def list(self, *, timeout: Optional[float] = None) -> List[Model]:
        """All of them, in the order the server loaded them."""
        response = self._client._call("ListModels", pb.ListModelsRequest(), timeout)
        return [_convert.model(model) for model in response.models]

    def get(self, name: str = "", *, timeout: Optional[float] = None) -> Model:
        """One: name, name@version or alias; empty for the only one of the server."""
        request = pb.GetModelRequest(name=name)
        return _convert.model((self._client._call("GetModel", request, timeout)).model)

    def load(self, name: str, directory: str = "", *, version: str = "",
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
        response = self._client._call("LoadModel", request, timeout, ONCE)
        return _convert.model(response.model)

    def unload(self, name: str, *, timeout: Optional[float] = None) -> None:
        """Takes "name" or "name@version" away, and waits for the requests that it has; not retried."""
        self._client._connection.check_single(MODELS)
        self._client._call("UnloadModel", admin_pb.UnloadModelRequest(name=name), timeout, ONCE)

    def alias(self, alias: str, target: str, *, timeout: Optional[float] = None) -> Model:
        """`alias` means `target`, "name" or "name@version", from now on. With a model's own name as
        the alias, the version becomes its current one."""
        self._client._connection.check_single(MODELS)
        request = admin_pb.SetAliasRequest(alias=alias, target=target)
        return _convert.model((self._client._call("SetAlias", request, timeout)).model)

    def delete_alias(self, alias: str, *, timeout: Optional[float] = None) -> None:
        """Removes another name of a model; not retried."""
        self._client._connection.check_single(MODELS)
        self._client._call("DeleteAlias", admin_pb.DeleteAliasRequest(alias=alias), timeout, ONCE)


class Client:
    """A client of a server, or of several that are the same. Thread-safe. It connects with the first
    call.

    target: "host:port" for one server; "dns:///host:port" or "ip:port,ip:port" for replicas, which
        are called in turn while they are healthy.
    tls: True, or a `TLS` that names the authority and the certificate of this client. Default:
        plaintext.
    token, token_file: a bearer token, sent with every call; the file is read again for each attempt.
        Refused without TLS, unless allow_plaintext_token says that something else encrypts the
        connection.
    retry: which failures are tried again. timeout: seconds, default of every call; None or infinity:
        no deadline. metadata: sent with every call.
    """

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
        credentials = self._connection.credentials()
        uri, options = self._connection.target.uri, self._connection.options
        self._channel = (grpc.insecure_channel(uri, options) if credentials is None
                         else grpc.secure_channel(uri, credentials, options))
        self._methods: Dict[str, Callable[..., Any]] = {}
        for name, (path, reply) in METHODS.items():
            make = self._channel.unary_stream if name in STREAMS else self._channel.unary_unary
            self._methods[name] = make(path, request_serializer=_serialize,
                                       response_deserializer=reply.FromString)
        self._pauses = threading.Condition()
        self.jobs = Jobs(self)
        self.models = Models(self)

    @property
    def target(self) -> str:
        """As given."""
        return self._connection.name

    def close(self) -> None:
        """Ends the connection, and the calls of all threads: they raise `Cancelled`."""
        self._connection.closed = True
        self._channel.close()
        self._end_pauses()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
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
        """Draws images and waits for all of them. What is None takes the model's default.

        model: name, name@version or alias; needed when more than one model of the server reads what is
            given, a prompt, labels or class_vectors.
        prompt: what the images show, in words, for models that read text; one text for all images, or
            one each. negative_prompt: what they do not show; None is the model's own default.
        prompt_2, negative_prompt_2: the same for the second text encoder, of models that have two.
        clip_skip: layers left out at the end of the text encoder.
        max_chunks: chunks (75 tokens for CLIP) of each text that are read; 1 reads as much as diffusers.
        labels: class of each image, by index or name; one label serves all images.
        class_vectors: numbers in place of labels, for models that take numbers: one vector for all images,
            or a list of vectors, one each. From -10000 to 10000.
        original_size, crop, target_size: what SDXL is told of a picture's history: pixels or (width,
            height), and (left, top). Default: the size of the image, uncropped.
        count: number of images.
        seed: of the first image, image i has seed + i; or one for each image. The same seed gives the
            same bytes. Default: random, fixed before the first attempt.
        size: pixels, or (width, height). Default: that of init_image without a mask, else the model's.
        init_image: start from this picture: a path, the bytes of a PNG, JPEG or WebP file, an Image of
            this package, a Pillow image, or an array [height, width, channels]; strength in (0, 1] says
            how much of it changes. mask: draw only a part of it anew, a picture of the same size, white
            where to draw, in any of these forms.
        initial_noise: float32 [count, height, width, channels] of unit variance, from -10000 to 10000.
        steps, sampler, noise_schedule, guidance_scale, image_guidance_scale, guidance_rescale,
            guidance_start, guidance_stop, eta, s_churn, s_tmin, s_tmax, s_noise, solver_order: see
            image_generation.proto, which has their ranges.
        format: of the images; quality: 1 to 100, of jpeg and webp; embed_metadata: parameters in the
            PNG (default True).
        priority: who goes first when requests wait.
        request_id: the same request of the same id is drawn once.
        survives: the job goes on when nobody is connected; see `jobs`.
        timings: return a timeline.
        timeout: seconds for all attempts together; infinity: no deadline. metadata,
            traceparent: sent with the call.
        """
        fields = _convert.fields_of(locals())
        attempts = self._connection.attempts(timeout)
        headers = self._connection.headers(metadata, traceparent)
        request = pb.GenerateRequest(params=self._params(fields, attempts, headers))
        return _convert.result(self._attempt("Generate", request, attempts, headers))

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
            metadata: Optional[Metadata] = None, traceparent: Optional[str] = None) -> Stream:
        """As `generate`, told as it happens. The request is sent before this returns.

        previews: True, or which; the stream then has `Preview` events.
        """
        fields = _convert.fields_of(locals())
        state = self._stream_state(None, timeout, metadata, traceparent)
        state.generate = pb.StreamGenerateRequest(
            params=self._params(fields, state.attempts, state.headers),
            preview=_convert.preview_options(previews))
        return Stream(self, state)

    def server_info(self, *, timeout: Optional[float] = None) -> ServerInfo:
        """What the server is and allows; of replicas, any."""
        return _convert.server_info(
            self._call("GetServerInfo", pb.GetServerInfoRequest(), timeout))

    def healthy(self, service: str = "", *, timeout: Optional[float] = None) -> bool:
        """Whether a service is SERVING; empty: the server as a whole. Without the restart_attempts of
        the client's policy: it tells soon that a server is gone."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = self._call("Health", request, timeout, self._connection.retry_health)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def _params(self, fields: Dict[str, Any], attempts: Attempts,
                headers: Headers) -> pb.GenerationParams:
        """The message of the arguments of `generate`, after a look at the model if classes have names."""
        if _convert.needs_names(fields["labels"]):
            model = self._model_of_labels(fields["model"] or "", attempts, headers)
            fields["labels"] = _convert.label_indices(fields["labels"], model)
        return _convert.generation_params(fields)

    def _model_of_labels(self, name: str, attempts: Attempts, headers: Headers) -> Model:
        """The model called `name`, or else the only one that reads labels. Waits while it is loading, each second."""
        wait = _convert.LoadingWait(attempts)
        while True:
            with wait.asking():
                if name:
                    request = pb.GetModelRequest(name=name)
                    models = [self._attempt("GetModel", request, attempts, headers).model]
                else:
                    models = self._attempt("ListModels", pb.ListModelsRequest(), attempts, headers).models
            model = _convert.model_of_labels(name, models)
            if model.state != "loading":
                return model
            self._pause(wait.delay(model))

    def _stream_state(self, watch: Optional[pb.WatchJobRequest], timeout: Optional[float],
                      metadata: Optional[Metadata], traceparent: Optional[str]) -> StreamState:
        return StreamState(self._connection.attempts(timeout),
                           self._connection.headers(metadata, traceparent), watch)

    def _call(self, name: str, request: Any, timeout: Optional[float],
              retry: Optional[RetryPolicy] = None) -> Any:
        return self._attempt(name, request, self._connection.attempts(timeout, retry),
                             self._connection.headers(None, None))

    def _attempt(self, name: str, request: Any, attempts: Attempts, headers: Headers) -> Any:
        while True:
            try:
                response = self._begin(name, request, attempts, self._connection.with_token(headers))
                attempts.succeeded()
                return response
            except grpc.RpcError as failure:
                error = self._connection.error(failure)
            delay = attempts.failed(error)
            if delay is None:
                raise error
            self._pause(delay)

    def _begin(self, name: str, request: Any, attempts: Attempts, headers: Headers) -> Any:
        """One attempt: the reply, or the call of a stream."""
        try:
            return self._methods[name](request, timeout=attempts.remaining(), metadata=headers)
        except ValueError:
            if self._connection.closed:  # gRPC's way to say it
                raise was_closed() from None
            raise

    def _pause(self, seconds: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Waits before the next attempt, unless there will be none."""
        with self._pauses:
            self._pauses.wait_for(lambda: self._connection.closed or cancelled(), seconds)

    def _end_pauses(self) -> None:
        with self._pauses:
            self._pauses.notify_all()


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())
