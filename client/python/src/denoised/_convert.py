# SPDX-License-Identifier: Apache-2.0
"""Messages of the wire contract to and from the types of this package."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import numbers
import os
import random
import reprlib
import time
from datetime import datetime, timedelta, timezone
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple, Type, TypeVar, Union

from denoised.v1 import image_generation_pb2 as pb

from .errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from .retry import Attempts
from .types import (Completed, Device, Event, Image, ImageReady, Job, Model, ModelCapabilities,
                    ModelDefaults, ModelLimits, Params, Preview, Previews, Progress, Prompt, Queued, Result,
                    ServerInfo, Started, TimelineEntry, Timing)

T = TypeVar("T")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def prefix_of(enum: Any) -> str:
    """"SAMPLER_" of the enumeration Sampler, whose first value is SAMPLER_UNSPECIFIED."""
    return str(enum.DESCRIPTOR.values[0].name)[:-len("UNSPECIFIED")]


def names_of(enum: Any) -> List[str]:
    """The values that can be asked for, in the order of the contract."""
    return [value.name[len(prefix_of(enum)):].lower() for value in enum.DESCRIPTOR.values
            if value.number != 0]


def _name(enum: Any, number: int) -> str:
    value = enum.DESCRIPTOR.values_by_number.get(number)
    if value is None or number == 0:
        return "unknown"  # of a newer server
    return str(value.name)[len(prefix_of(enum)):].lower()


def number_of(enum: Any, field: str, name: str) -> Any:
    value = enum.DESCRIPTOR.values_by_name.get(prefix_of(enum) + str(name).upper())
    if value is None or value.number == 0:
        raise InvalidArgument(f"{field} is {name!r}; use one of {', '.join(names_of(enum))}")
    return int(value.number)


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _time(message: Any, field: str) -> Optional[datetime]:
    if not message.HasField(field):
        return None
    time = getattr(message, field)
    return _EPOCH + timedelta(seconds=time.seconds, microseconds=time.nanos // 1000)


def _same_fields(cls: Type[T], message: Any, **others: Any) -> T:
    """`cls` of a message whose other fields have the same names."""
    present = {field.name: field for field in message.DESCRIPTOR.fields}
    values = dict(others)
    for field in dataclasses.fields(cls):
        if field.name in values:
            continue
        descriptor = present[field.name]
        value = getattr(message, field.name)
        if hasattr(value, "extend"):  # repeated
            value = tuple(value)
        elif descriptor.has_presence and not message.HasField(field.name):
            value = None
        values[field.name] = value
    return cls(**values)


def _sizes(message: Any) -> Dict[str, Tuple[int, int]]:
    """original_size, crop and target_size, as arguments of `generate`."""
    found = {name: (getattr(message, name).width, getattr(message, name).height)
             for name in ("original_size", "target_size") if message.HasField(name)}
    if message.HasField("crop"):
        found["crop"] = (message.crop.left, message.crop.top)
    return found


def _again(message: Any) -> Dict[str, Any]:
    """Arguments of `generate` for effective parameters. The request_id is left out, so that it draws
    anew."""
    given: Dict[str, Any] = {name: getattr(message, name) for name in (
        "count", "guidance_scale", "image_guidance_scale", "guidance_rescale", "guidance_start",
        "guidance_stop", "steps", "eta", "s_churn", "s_tmin", "s_tmax", "s_noise", "solver_order")
        if message.HasField(name)}
    given["model"] = message.model
    given["seed"] = list(message.seeds) or message.seed
    given["size"] = (message.width, message.height)
    for name, enum in (("sampler", pb.Sampler), ("noise_schedule", pb.NoiseSchedule),
                       ("priority", pb.Priority)):
        if getattr(message, name):
            given[name] = _name(enum, getattr(message, name))
    for name, field in (("prompt", "text"), ("negative_prompt", "negative_text"),
                        ("prompt_2", "text_2"), ("negative_prompt_2", "negative_text_2"),
                        ("labels", "class_label")):
        values = [getattr(c, field) if c.HasField(field) else None for c in message.conditions]
        if any(value is not None for value in values):
            given[name] = values
    vectors = [list(c.class_vector) for c in message.conditions if c.class_vector]
    if vectors:
        given["class_vectors"] = vectors
    for name in ("clip_skip", "max_chunks"):
        if message.text_options.HasField(name):
            given[name] = getattr(message.text_options, name)
    given.update(_sizes(message.size_conditions))
    if message.init_image.HasField("strength"):
        given["strength"] = message.init_image.strength
    if message.output.format:
        given["format"] = _name(pb.ImageFormat, message.output.format)
    for name in ("quality", "embed_metadata"):
        if message.output.HasField(name):
            given[name] = getattr(message.output, name)
    return given


def _prompt(condition: Any, read: Any) -> Prompt:
    return Prompt(text=condition.text, negative=_optional(condition, "negative_text"),
                  text_2=_optional(condition, "text_2"),
                  negative_2=_optional(condition, "negative_text_2"), tokens=read.tokens,
                  cut_off=read.cut_off, negative_cut_off=read.negative_cut_off,
                  text_2_cut_off=read.cut_off_2, negative_2_cut_off=read.negative_cut_off_2)


def params(message: Any, run: Any) -> Params:
    conditions = message.conditions
    return _same_fields(
        Params, message, labels=tuple(c.class_label for c in conditions if c.HasField("class_label")),
        prompts=tuple(_prompt(c, read) for c, read in zip(conditions, run.texts)),
        class_vectors=tuple(tuple(c.class_vector) for c in conditions if c.class_vector),
        max_chunks=message.text_options.max_chunks, model_version=run.model_version,
        seed=message.seed, count=message.count, guidance_scale=message.guidance_scale,
        width=message.width, height=message.height, steps=run.steps, evaluations=run.evaluations,
        strength=message.init_image.strength if message.init_image.HasField("strength") else 1.0,
        masked=message.HasField("mask"), again=_again(message),
        sampler=_name(pb.Sampler, message.sampler),
        noise_schedule=_name(pb.NoiseSchedule, message.noise_schedule),
        priority=_name(pb.Priority, message.priority))


def image(message: Any, of: Optional[Params]) -> Image:
    shape: Optional[Tuple[int, ...]] = None
    dtype: Optional[str] = None
    data = message.encoded
    if message.HasField("tensor"):
        data, shape = message.tensor.data, tuple(message.tensor.shape)
        dtype = _name(pb.DataType, message.tensor.data_type)
    return Image(index=message.index, seed=message.seed, label=_optional(message, "class_label"),
                 mime_type=message.mime_type, width=message.width, height=message.height, data=data,
                 shape=shape, dtype=dtype, params=of)


def timing(message: Any) -> Timing:
    return _same_fields(Timing, message)


def timeline(message: Any) -> List[TimelineEntry]:
    return [_same_fields(TimelineEntry, entry,
                         milestone=_name(pb.TimelineEntry.Milestone, entry.milestone),
                         stage=_name(pb.Stage, entry.stage) if entry.stage else None)
            for entry in message.entries]


def result(response: Any) -> Result:
    run = params(response.params, response.run)
    return Result(images=[image(i, run) for i in response.images], params=run,
                  timing=timing(response.timing), timeline=timeline(response.timeline))


def event(message: Any, of: Optional[Params]) -> Optional[Event]:
    """None for a kind that this version does not know. `of`: what is run, as far as it is known."""
    kind = message.WhichOneof("event")
    head = {"request_id": message.request_id, "sequence": message.sequence}
    body = getattr(message, kind) if kind else None
    if kind == "queued":
        return _same_fields(Queued, body, params=params(body.params, body.run), **head)
    if kind == "started":
        return _same_fields(Started, body, **head)
    if kind == "progress":
        return _same_fields(Progress, body, **head)
    if kind == "preview":
        return _same_fields(Preview, body, image=image(body.image, of), **head)
    if kind == "image":
        return ImageReady(image=image(body.image, of), **head)
    if kind == "completed":
        return Completed(params=params(body.params, body.run), timing=timing(body.timing),
                         timeline=timeline(body.timeline), **head)
    return None


def job(message: Any) -> Job:
    created = _time(message, "create_time") or _EPOCH
    return _same_fields(
        Job, message, state=_name(pb.JobState, message.state), params=params(message.params, message.run),
        create_time=created, start_time=_time(message, "start_time"),
        end_time=_time(message, "end_time"), expire_time=_time(message, "expire_time"),
        evaluations_done=message.progress.evaluations_done,
        evaluations_total=message.progress.evaluations_total, error=message.error.message)


def model(message: Any) -> Model:
    return _same_fields(
        Model, message, state=_name(pb.ModelState, message.state),
        capabilities=_same_fields(ModelCapabilities, message.capabilities),
        defaults=_same_fields(
            ModelDefaults, message.defaults,
            sampler=_name(pb.Sampler, message.defaults.sampler),
            noise_schedule=_name(pb.NoiseSchedule, message.defaults.noise_schedule)),
        limits=_same_fields(ModelLimits, message.limits),
        samplers=tuple(_name(pb.Sampler, s) for s in message.samplers),
        noise_schedules=tuple(_name(pb.NoiseSchedule, s) for s in message.noise_schedules),
        stages=tuple(_name(pb.Stage, s) for s in message.stages),
        preview_decoders=tuple(_name(pb.PreviewDecoder, d) for d in message.preview_decoders))


def server_info(message: Any) -> ServerInfo:
    devices = tuple(_same_fields(Device, device) for device in message.devices)
    return _same_fields(
        ServerInfo, message, state=_name(pb.ServerState, message.state), devices=devices,
        start_time=_time(message, "start_time") or _EPOCH,
        features=tuple(_name(pb.ServerFeature, f) for f in message.features),
        limits={field.name: value for field, value in message.limits.ListFields()})


def seed_of(request_id: str) -> int:
    """The same for the same id, whoever computes it: FNV-1a, as in the C++ library."""
    value = 14695981039346656037
    for byte in request_id.encode():
        value = ((value ^ byte) * 1099511628211) % 2**64
    return value


def random_bits() -> int:
    return random.SystemRandom().getrandbits(64)


def _array(field: str, array: Any) -> pb.Tensor:
    """A Tensor of anything that NumPy makes an array of."""
    import numpy
    array = numpy.asarray(array)
    if array.dtype == numpy.uint8:
        return pb.Tensor(data_type=number_of(pb.DataType, field, "uint8"), shape=array.shape,
                         data=array.tobytes())
    if array.dtype.kind != "f":
        raise InvalidArgument(f"{field} has elements of {array.dtype}; use float32 or uint8")
    return pb.Tensor(data_type=number_of(pb.DataType, field, "float32"), shape=array.shape,
                     data=array.astype("<f4").tobytes())


_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")


def _picture(field: str, source: Any, to: Union[pb.InitImage, pb.Mask]) -> None:
    """A picture in any of the forms that `generate` takes."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        to.encoded = bytes(source)
    elif isinstance(source, (str, os.PathLike)):
        with open(source, "rb") as file:
            to.encoded = file.read()
    elif isinstance(source, Image) and source.shape is None:
        to.encoded = source.data
    elif hasattr(source, "getbands"):  # Pillow's
        if source.mode == "F":  # nothing says which number is white
            raise InvalidArgument(f'{field} has pixels of floats, mode "F"; use .convert("L") or an array')
        if source.mode.startswith("I") and source.mode != "I;16":
            source = source.convert("I").convert("I;16")  # 16 bits: as RGB they would be cut at 255
        elif source.mode not in _PNG_MODES:
            source = source.convert("RGBA" if source.getbands()[-1] in "Aa" else "RGB")
        png = io.BytesIO()
        source.save(png, "PNG")
        to.encoded = png.getvalue()
    else:
        array = source.numpy() if isinstance(source, Image) else source
        to.tensor.CopyFrom(_array(field, array))


def _as_list(value: Union[T, Iterable[T]], single: Union[type, Tuple[type, ...]]) -> List[T]:
    return [value] if isinstance(value, single) else list(value)  # type: ignore[list-item, arg-type]


def _among(given: Dict[str, Any], *names: str) -> List[str]:
    return [name for name in names if name in given]


def _shown(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # of an int of more than 4300 digits
        return "too large to be shown"


@contextlib.contextmanager
def _named(name: str, value: Any) -> Iterator[None]:
    """What Python and protobuf refuse of an argument is told with its name."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        reason = str(error)
        if len(reason) > 200:  # it quotes the value, and says at the end what is wrong
            reason = "..." + reason[-200:]
        raise InvalidArgument(f"{name} is {_shown(value)}: {reason}") from error


@contextlib.contextmanager
def _taken(given: Dict[str, Any], name: str) -> Iterator[Any]:
    """The argument `name`, taken out of `given`."""
    value = given.pop(name)
    with _named(name, value):
        yield value


def message_of_prompts(given: Dict[str, Any], message: pb.GenerationParams) -> None:
    """Moves the prompts of `given` into the message."""
    fields = {"prompt": "text", "negative_prompt": "negative_text", "prompt_2": "text_2",
              "negative_prompt_2": "negative_text_2"}
    options, others = _among(given, "clip_skip", "max_chunks"), _among(given, *fields)
    if "prompt" not in given and (options or others):
        raise InvalidArgument("negative_prompt, prompt_2, negative_prompt_2, clip_skip and "
                              "max_chunks are for a prompt; give one, \"\" if it is to be empty")
    for name in options:
        with _taken(given, name) as value:
            setattr(message.text_options, name, value)
    asked = {name: given.pop(name) for name in others}
    texts: Dict[str, List[Any]] = {}
    for name in others:
        with _named(name, asked[name]):
            texts[name] = _as_list(asked[name], str)
    most = max((len(values) for values in texts.values()), default=0)
    for name in others:
        if len(texts[name]) not in (1, most):
            raise InvalidArgument(f"{name} has {len(texts[name])} texts, but {most} are given for "
                                  "another; give one for all, or as many")
    conditions = [message.conditions.add() for _ in range(most)]
    for name in others:
        with _named(name, asked[name]):
            for i, condition in enumerate(conditions):
                text = texts[name][i % len(texts[name])]
                if text is not None:
                    setattr(condition, fields[name], text)


def _set_size(size: Any, of: Any) -> None:
    """One number for a square, or width and height."""
    of.width, of.height = (size, size) if isinstance(size, numbers.Integral) else size


def message_of_sizes(given: Dict[str, Any], message: pb.SizeConditions) -> None:
    """Moves what a model is told of sizes into the message."""
    for name in _among(given, "original_size", "target_size"):
        with _taken(given, name) as size:
            _set_size(size, getattr(message, name))
    if "crop" in given:
        with _taken(given, "crop") as crop:
            message.crop.left, message.crop.top = crop


def fields_of(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Of the arguments of `generate` and `stream`, those that say what to draw."""
    others = ("self", "previews", "timeout", "metadata", "traceparent")
    fields = {name: value for name, value in arguments.items() if name not in others}
    if isinstance(fields["labels"], Iterator):  # they are read twice
        fields["labels"] = list(fields["labels"])
    return fields


def generation_params(fields: Dict[str, Any]) -> pb.GenerationParams:
    """The message of the keyword arguments of `generate`, whose labels are indices. Fixes the seed
    if the caller did not, so that every attempt draws the same images, those of another call with
    the same request_id among them; and the id of what survives, so that a second attempt finds the
    first."""
    given = {name: value for name, value in fields.items() if value is not None}
    message = pb.GenerationParams()
    if sum(name in given for name in ("prompt", "labels", "class_vectors")) > 1:
        raise InvalidArgument("more than one of prompt, labels and class_vectors is given; give the "
                              "one that the model takes")
    for name, enum in (("sampler", pb.Sampler), ("noise_schedule", pb.NoiseSchedule),
                       ("priority", pb.Priority)):
        if name in given:
            setattr(message, name, number_of(enum, name, given.pop(name)))
    if "format" in given:
        message.output.format = number_of(pb.ImageFormat, "format", given.pop("format"))
    for name in _among(given, "quality", "embed_metadata"):
        with _taken(given, name) as value:
            setattr(message.output, name, value)
    if "size" in given:
        with _taken(given, "size") as size:
            _set_size(size, message)
    message_of_prompts(given, message)
    if "labels" in given:
        with _taken(given, "labels") as labels:
            for label in _as_list(labels, numbers.Integral):
                message.conditions.add(class_label=label)
    if "class_vectors" in given:
        with _taken(given, "class_vectors") as value:
            vectors = _as_list(value, numbers.Real)
            if all(isinstance(vector, numbers.Real) for vector in vectors):
                vectors = [vectors]  # one for all images
            for vector in vectors:
                message.conditions.add(class_vector=_as_list(vector, numbers.Real))
    if _among(given, "original_size", "crop", "target_size"):
        message_of_sizes(given, message.size_conditions)
    if "seed" in given:
        with _taken(given, "seed") as value:
            seeds = _as_list(value, numbers.Integral)
            if len(seeds) > 1:
                message.seeds.extend(seeds)
            elif seeds:
                message.seed = seeds[0]
    if "initial_noise" in given:
        with _taken(given, "initial_noise") as noise:
            message.initial_noise.CopyFrom(_array("initial_noise", noise))
    for name in _among(given, "init_image", "mask"):
        with _taken(given, name) as picture:
            _picture(name, picture, getattr(message, name))
    if "strength" in given:
        with _taken(given, "strength") as strength:
            message.init_image.strength = strength
    if given.pop("survives", False):
        message.disconnect_policy = pb.DisconnectPolicy.DISCONNECT_POLICY_CONTINUE
    if given.pop("timings", False):
        message.include_timings = True
    for name in list(given):
        with _taken(given, name) as value:
            setattr(message, name, value)
    if message.disconnect_policy and not message.request_id:
        message.request_id = f"{random_bits():016x}{random_bits():016x}"
    if not message.HasField("seed") and not message.seeds:
        message.seed = seed_of(fields["request_id"]) if fields["request_id"] else random_bits()
    return message


def watch_request(request_id: str, after: int) -> pb.WatchJobRequest:
    message = pb.WatchJobRequest()
    with _named("request_id", request_id):
        message.request_id = request_id
    with _named("after", after):
        message.after_sequence = after
    return message


def preview_options(previews: Union[bool, Previews]) -> Optional[pb.PreviewOptions]:
    if previews is False:
        return None
    if previews is True:
        previews = Previews()
    if not isinstance(previews, Previews):
        raise InvalidArgument(f"previews is {_shown(previews)}; use True, False or Previews(...)")
    message = pb.PreviewOptions(kind=number_of(pb.PreviewKind, "previews.kind", previews.kind))
    for name, field in (("every", "every_evaluations"), ("max_edge", "max_edge")):
        value = getattr(previews, name)
        if value is not None:
            with _named(f"previews.{name}", value):
                setattr(message, field, value)
    if previews.format is not None:
        message.format = number_of(pb.ImageFormat, "previews.format", previews.format)
    if previews.decoder is not None:
        message.decoder = number_of(pb.PreviewDecoder, "previews.decoder", previews.decoder)
    return message


def needs_names(labels: Any) -> bool:
    """Whether any label is a name, so that the model must be asked for its classes."""
    try:
        return isinstance(labels, str) or any(isinstance(label, str) for label in labels)
    except TypeError:  # one number, none, or what is refused later
        return False


class LoadingWait:
    """The wait of one call for a model that is loading, within the time that the call has."""

    SECONDS = 30.0
    POLL_SECONDS = 1.0
    LAST_SECONDS = 0.05  # too short for another question

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._end = time.monotonic() + self.SECONDS
        self._model: Optional[Model] = None

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """What ends for want of time inside ends the wait."""
        try:
            yield
        except DeadlineExceeded:
            if self._model is None:
                raise
            raise self._still_loading(self._model) from None

    def delay(self, loading: Model) -> float:
        """Seconds until the next question; FailedPrecondition at the end."""
        self._model = loading
        left = self._end - time.monotonic()
        remaining = self._attempts.remaining()
        if remaining is not None:
            left = min(left, remaining)
        if left <= self.LAST_SECONDS or not self._attempts.retries:
            raise self._still_loading(loading)
        # Near the end more often, so that one that becomes ready then is seen.
        return min(self.POLL_SECONDS, left / 2)

    @staticmethod
    def _still_loading(loading: Model) -> FailedPrecondition:
        return FailedPrecondition(f"model {loading.name} is still loading; try again when it is available, or name "
                                  "another one")


def model_of_labels(name: str, of: Iterable[pb.Model]) -> Model:
    """The one in `of`, which is called `name`; without a name, the only one that reads labels. One that is "loading"
    is to be waited for, because a server does not tell then what it reads. FailedPrecondition if it cannot draw."""
    models = [model(each) for each in of if name or each.current]
    ready = [each for each in models if each.state not in ("loading", "failed", "unloading")]
    loading = [each for each in models if each.state == "loading"]
    fitting = [each for each in ready if each.capabilities.class_label]
    if len(models) == 1 or (models and not ready):
        fitting = (loading or models)[:1]
    elif not fitting:
        fitting = loading[:1]
    if len(fitting) != 1:
        names = ", ".join(each.name for each in fitting)
        raise InvalidArgument(f"model is not set; use one of: {names}" if names
                              else "model is not set, and no model of the server reads labels")
    chosen = fitting[0]
    if chosen.state == "failed":
        raise FailedPrecondition(f"model {chosen.name} could not be loaded: {chosen.error}")
    if chosen.state == "unloading":
        raise FailedPrecondition(f"model {chosen.name} is being unloaded; name another one")
    return chosen


def label_indices(labels: Any, of: Model) -> List[int]:
    names: Dict[str, int] = {}
    for index, name in enumerate(of.labels):
        names.setdefault(name, index)  # of two alike the first, as elsewhere
    indices: List[int] = []
    for label in _as_list(labels, (str, numbers.Integral)):
        if isinstance(label, str):
            if label not in names:
                known = ", ".join(of.labels) or "it has no names; use indices"
                raise InvalidArgument(f"labels: model {of.name} has no class {label!r}: {known}")
            indices.append(names[label])
        else:
            indices.append(label)
    return indices
