# SPDX-License-Identifier: Apache-2.0
"""Messages of the wire contract to and from the types of this package."""

from __future__ import annotations

import dataclasses
import io
import numbers
import os
import random
from datetime import datetime, timedelta, timezone
from typing import Any, Dict, Iterable, List, Optional, Tuple, Type, TypeVar, Union

from denoised.v1 import image_generation_pb2 as pb

from .errors import InvalidArgument
from .types import (Completed, Device, Event, Image, ImageReady, Job, Model, ModelDefaults,
                    ModelLimits, Params, Preview, Previews, Progress, Prompt, Queued, Result,
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


def params(message: Any) -> Params:
    return _same_fields(
        Params, message, labels=tuple(message.class_labels),
        prompts=tuple(_same_fields(Prompt, prompt) for prompt in message.text.prompts),
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
                         milestone=_name(pb.TimelineEntry.Milestone, entry.milestone))
            for entry in message.entries]


def result(response: Any) -> Result:
    run = params(response.params)
    return Result(images=[image(i, run) for i in response.images], params=run,
                  timing=timing(response.timing), timeline=timeline(response.timeline))


def event(message: Any, of: Optional[Params]) -> Optional[Event]:
    """None for a kind that this version does not know. `of`: what is run, as far as it is known."""
    kind = message.WhichOneof("event")
    head = {"request_id": message.request_id, "sequence": message.sequence}
    body = getattr(message, kind) if kind else None
    if kind == "queued":
        return _same_fields(Queued, body, params=params(body.params), **head)
    if kind == "started":
        return _same_fields(Started, body, **head)
    if kind == "progress":
        return _same_fields(Progress, body, **head)
    if kind == "preview":
        return _same_fields(Preview, body, image=image(body.image, of), **head)
    if kind == "image":
        return ImageReady(image=image(body.image, of), **head)
    if kind == "completed":
        return Completed(params=params(body.params), timing=timing(body.timing),
                         timeline=timeline(body.timeline), **head)
    return None


def job(message: Any) -> Job:
    created = _time(message, "create_time") or _EPOCH
    return _same_fields(
        Job, message, state=_name(pb.JobState, message.state), params=params(message.params),
        create_time=created, start_time=_time(message, "start_time"),
        end_time=_time(message, "end_time"), expire_time=_time(message, "expire_time"),
        evaluations_done=message.progress.evaluations_done,
        evaluations_total=message.progress.evaluations_total, error=message.error.message)


def model(message: Any) -> Model:
    return _same_fields(
        Model, message, state=_name(pb.ModelState, message.state),
        condition=_name(pb.ClassConditionKind, message.condition),
        defaults=_same_fields(
            ModelDefaults, message.defaults,
            sampler=_name(pb.Sampler, message.defaults.sampler),
            noise_schedule=_name(pb.NoiseSchedule, message.defaults.noise_schedule)),
        limits=_same_fields(ModelLimits, message.limits),
        samplers=tuple(_name(pb.Sampler, s) for s in message.samplers),
        noise_schedules=tuple(_name(pb.NoiseSchedule, s) for s in message.noise_schedules))


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


def _init_image(source: Any) -> pb.InitImage:
    if isinstance(source, (bytes, bytearray, memoryview)):
        return pb.InitImage(encoded=bytes(source))
    if isinstance(source, (str, os.PathLike)):
        with open(source, "rb") as file:
            return pb.InitImage(encoded=file.read())
    if isinstance(source, Image) and source.shape is None:
        return pb.InitImage(encoded=source.data)
    if isinstance(source, Image):
        source = source.numpy()
    elif hasattr(source, "getbands"):  # Pillow's
        png = io.BytesIO()
        source.save(png, "PNG")
        return pb.InitImage(encoded=png.getvalue())
    return pb.InitImage(tensor=_array("init_image", source))


def _as_list(value: Union[T, Iterable[T]], single: Union[type, Tuple[type, ...]]) -> List[T]:
    return [value] if isinstance(value, single) else list(value)  # type: ignore[list-item, arg-type]


def message_of_prompts(given: Dict[str, Any], message: pb.GenerationParams) -> None:
    """Moves the prompts of `given` into the message."""
    others = {name: _as_list(given.pop(key), str)
              for key, name in (("negative_prompt", "negative"), ("prompt_2", "text_2"),
                                ("negative_prompt_2", "negative_2")) if key in given}
    clip_skip = given.pop("clip_skip", None)
    if "prompt" not in given:
        if others or clip_skip is not None:
            raise InvalidArgument("negative_prompt, prompt_2, negative_prompt_2 and clip_skip are for "
                                  "a prompt; give one, \"\" if it is to be empty")
        return
    texts = _as_list(given.pop("prompt"), str)
    message.text.SetInParent()
    if clip_skip is not None:
        message.text.clip_skip = clip_skip
    most = max([len(texts)] + [len(values) for values in others.values()])
    for name, values in [("text", texts), *others.items()]:
        if len(values) not in (1, most):
            raise InvalidArgument(f"{len(values)} texts for {name}, but {most} for another; give one "
                                  "for all, or as many")
    for i in range(most):
        prompt = message.text.prompts.add(text=texts[i % len(texts)])
        for name, values in others.items():
            setattr(prompt, name, values[i % len(values)])


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
    try:
        for name in ("quality", "embed_metadata"):
            if name in given:
                setattr(message.output, name, given.pop(name))
        if "size" in given:
            size = given.pop("size")
            message.width, message.height = (size, size) if isinstance(size, numbers.Integral) else size
        message_of_prompts(given, message)
        if "labels" in given:
            labels = _as_list(given.pop("labels"), numbers.Integral)
            message.class_labels.SetInParent()
            message.class_labels.labels.extend(labels)
        if "class_vectors" in given:
            values = _as_list(given.pop("class_vectors"), numbers.Real)
            message.class_vectors.SetInParent()
            for value in values:
                message.class_vectors.values.extend(_as_list(value, numbers.Real))
        seeds = _as_list(given.pop("seed"), numbers.Integral) if "seed" in given else []
        if len(seeds) > 1:
            message.seeds.extend(seeds)
        elif seeds:
            message.seed = seeds[0]
        if "initial_noise" in given:
            message.initial_noise.CopyFrom(_array("initial_noise", given.pop("initial_noise")))
        if "init_image" in given:
            message.init_image.CopyFrom(_init_image(given.pop("init_image")))
        if "strength" in given:
            message.init_image.strength = given.pop("strength")
        if given.pop("survives", False):
            message.disconnect_policy = pb.DisconnectPolicy.DISCONNECT_POLICY_CONTINUE
        if given.pop("timings", False):
            message.include_timings = True
        for name, value in given.items():
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"a value has the wrong type or is too large: {error}") from error
    if message.disconnect_policy and not message.request_id:
        message.request_id = f"{random_bits():016x}"
    if not message.HasField("seed") and not message.seeds:
        message.seed = seed_of(fields["request_id"]) if fields["request_id"] else random_bits()
    return message


def preview_options(previews: Union[bool, Previews]) -> Optional[pb.PreviewOptions]:
    if previews is False:
        return None
    if previews is True:
        previews = Previews()
    message = pb.PreviewOptions(kind=number_of(pb.PreviewKind, "previews.kind", previews.kind))
    if previews.every is not None:
        message.every_evaluations = previews.every
    if previews.max_edge is not None:
        message.max_edge = previews.max_edge
    if previews.format is not None:
        message.format = number_of(pb.ImageFormat, "previews.format", previews.format)
    return message


def needs_names(labels: Any) -> bool:
    """Whether any label is a name, so that the model must be asked for its classes."""
    return isinstance(labels, str) or (
        labels is not None and not isinstance(labels, numbers.Integral)
        and any(isinstance(label, str) for label in labels))


def label_indices(labels: Any, of: Model) -> List[int]:
    names = {name: index for index, name in enumerate(of.labels)}
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
