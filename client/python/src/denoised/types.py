# SPDX-License-Identifier: Apache-2.0
"""What a server answers, in plain types. Enumerations are lower-case names: "dpm_solver", "png"."""

from __future__ import annotations

import base64
import builtins
import io
import os
import urllib.parse
from dataclasses import dataclass, field
from datetime import datetime
from typing import (TYPE_CHECKING, Any, Dict, Iterator, List, Literal, Mapping, Optional, Sequence,
                    Tuple, Union, cast, overload)

if TYPE_CHECKING:
    import numpy
    import PIL.Image

Sampler = Literal["ddpm", "ddim", "pndm", "euler", "euler_ancestral", "lms", "heun", "dpm_solver",
                  "dpm_solver_sde", "uni_pc", "lcm", "edm_euler", "edm_dpm_solver", "dpmpp_sde",
                  "deis", "kdpm2", "kdpm2_ancestral", "tcd", "dpm_solver_singlestep",
                  "flow_match_euler", "consistency", "sa_solver", "score_sde_ve"]
NoiseSchedule = Literal["native", "karras", "exponential", "beta"]
ImageFormat = Literal["png", "jpeg", "webp", "raw_float32", "raw_uint8"]
Priority = Literal["interactive", "normal", "batch"]
PreviewKind = Literal["predicted_x0", "noisy_state"]
PreviewDecoder = Literal["linear", "tiny"]


@dataclass(frozen=True)
class Previews:
    """Which previews a stream has. What is None is the server's default."""

    kind: PreviewKind = "predicted_x0"
    """The image that the model predicts, or the noisy state itself."""
    every: Optional[int] = None
    """A preview every so many evaluations of an image. Default: 1."""
    max_edge: Optional[int] = None
    """Longest edge in pixels; larger images are scaled down. Default: 256."""
    format: Optional[ImageFormat] = None
    """Default: jpeg."""
    decoder: Optional[PreviewDecoder] = None
    """Of latents: a colour for each latent pixel, or the small autoencoder of models that have one.
    Default: "tiny" where it is."""


@dataclass(frozen=True)
class Prompt:
    """What an image shows, in words, and what not; and how much of it the model reads."""

    text: str
    negative: Optional[str]
    """None: the model's own way of drawing without a prompt."""
    text_2: Optional[str]
    negative_2: Optional[str]
    """For a second text encoder; None or "": as the first."""
    tokens: int
    """Of `text`, that the model reads."""
    cut_off: str
    """The end of `text` that the model does not read."""
    negative_cut_off: str
    text_2_cut_off: str
    negative_2_cut_off: str


@dataclass(frozen=True)
class Params:
    """What was run, every default filled in."""

    model: str
    model_version: str
    request_id: str
    seed: int
    """Of the first image."""
    seeds: Tuple[int, ...]
    """Of each image, when the request named them; empty when image i has seed + i."""
    count: int
    labels: Tuple[int, ...]
    """Of each image; empty when the model has no labels."""
    prompts: Tuple[Prompt, ...]
    """One for all images, or one each; empty for models that read no text."""
    max_chunks: int
    """Of each text; 0 for models that read no text."""
    class_vectors: Tuple[Tuple[float, ...], ...]
    """Of each image; empty for models that take no numbers."""
    guidance_scale: float
    """1: none."""
    image_guidance_scale: Optional[float]
    """None where it had no part, as the next three."""
    guidance_rescale: Optional[float]
    guidance_start: Optional[float]
    guidance_stop: Optional[float]
    steps: int
    """That are run: fewer than were asked for from an init image."""
    evaluations: int
    """Of the model, for each image."""
    sampler: str
    noise_schedule: str
    width: int
    height: int
    strength: float
    """Of image to image; 1 when drawn from noise."""
    masked: bool
    """Whether a mask decided what was drawn anew."""
    eta: Optional[float]
    """None where the sampler has none, as the next five."""
    s_churn: Optional[float]
    s_tmin: Optional[float]
    s_tmax: Optional[float]
    s_noise: Optional[float]
    solver_order: Optional[int]
    priority: str
    again: Mapping[str, Any] = field(repr=False)
    """Keyword arguments of `generate` that draw the same images. Pictures and noise that were sent are
    not among them: give init_image, mask and initial_noise again."""


@dataclass(frozen=True)
class Image:
    """One image: a file, or an array for the formats raw_float32 and raw_uint8."""

    index: int
    """Within the request, from 0."""
    seed: int
    """count=1 with this seed draws this image alone."""
    label: Optional[int]
    """None when the model has no labels."""
    mime_type: str
    """"image/png"; "application/octet-stream" for an array."""
    width: int
    height: int
    data: builtins.bytes = field(repr=False)
    """The file; or the array's elements, row-major, little-endian."""
    shape: Optional[Tuple[int, ...]] = None
    """[height, width, channels] of an array; None for a file."""
    dtype: Optional[str] = None
    """"float32", nominally in [-1, 1], or "uint8", of an array; None for a file."""
    params: Optional[Params] = field(default=None, repr=False)
    """What was run."""

    def bytes(self) -> builtins.bytes:
        """The file as the server encoded it; the elements of an array."""
        return self.data

    def save(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes the file. An array is written as .npy if the path ends so (needs NumPy), else as its
        elements alone."""
        if self.shape is not None and os.fspath(path).endswith(".npy"):
            import numpy
            numpy.save(path, self.numpy())
            return
        with open(path, "wb") as file:
            file.write(self.data)

    def pil(self) -> "PIL.Image.Image":
        """As a Pillow image. Needs Pillow; NumPy too for float32."""
        import PIL.Image
        if self.shape is None:
            image = PIL.Image.open(io.BytesIO(self.data))
            image.load()
            return image
        channels = self.shape[-1]
        mode = {1: "L", 3: "RGB"}.get(channels)
        if mode is None:
            raise ValueError(f"an image of {channels} channels is no picture; use numpy()")
        data = self.data
        if self.dtype == "float32":
            data = ((self.numpy() * 0.5 + 0.5).clip(0, 1) * 255 + 0.5).astype("uint8").tobytes()
        return PIL.Image.frombytes(mode, (self.width, self.height), data)

    def numpy(self) -> "numpy.ndarray[Any, Any]":
        """An array [height, width, channels]: uint8 in [0, 255] of a file, which needs Pillow; the
        array itself for the raw formats. Needs NumPy."""
        import numpy
        if self.shape is not None:
            kind = {"float32": "<f4", "uint8": "u1"}[self.dtype or ""]
            pixels: Any = numpy.frombuffer(self.data, dtype=kind).reshape(self.shape).copy()
        else:
            pixels = numpy.array(self.pil())
        return cast("numpy.ndarray[Any, Any]", pixels[:, :, None] if pixels.ndim == 2 else pixels)

    def _file(self) -> Optional[Tuple[str, builtins.bytes]]:
        """A type that a browser shows, and its file; None if Pillow is needed and missing."""
        if self.shape is None:
            return self.mime_type, self.data
        try:
            file = io.BytesIO()
            self.pil().save(file, "PNG")
        except (ImportError, ValueError):
            return None
        return "image/png", file.getvalue()

    def data_uri(self) -> str:
        """For HTML; empty for an array that Pillow cannot make a picture of."""
        shown = self._file()
        if not shown:
            return ""
        kind = urllib.parse.quote(shown[0], safe="/+")  # what a server sends must not end an attribute
        return f"data:{kind};base64,{base64.b64encode(shown[1]).decode()}"

    def _repr_mimebundle_(self, **_: object) -> Dict[str, str]:
        """How a notebook shows it."""
        shown = self._file()
        bundle = {"text/plain": repr(self)}
        if shown:
            bundle[shown[0]] = base64.b64encode(shown[1]).decode()
        return bundle


@dataclass(frozen=True)
class Timing:
    """Where the time went."""

    queued_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class TimelineEntry:
    """One moment of a request's life."""

    milestone: str
    """"queued", "admitted", "evaluation", "stage", "decoded" or "sent"."""
    seconds: float
    """Since the request arrived."""
    evaluations: Optional[int]
    """Of "evaluation": done so far, over all images."""
    image_index: Optional[int]
    """Of "stage", "decoded" and "sent"."""
    stage: Optional[str]
    """Of "stage": "condition", "encode", "denoise" or "decode"."""
    device_seconds: Optional[float]
    """Of "stage": what it took on the device, where that is known."""


@dataclass(frozen=True)
class Result(Sequence[Image]):
    """All images of a request, by index: a sequence of them."""

    images: List[Image]
    params: Params
    timing: Timing
    timeline: List[TimelineEntry] = field(default_factory=list, repr=False)
    """With timings=True."""

    @overload
    def __getitem__(self, index: int) -> Image: ...
    @overload
    def __getitem__(self, index: slice) -> List[Image]: ...
    def __getitem__(self, index: Union[int, slice]) -> Union[Image, List[Image]]:
        return self.images[index]

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[Image]:
        return iter(self.images)

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        from .notebook import gallery
        return gallery(self.images)


@dataclass(frozen=True)
class Event:
    """What happened to a job."""

    request_id: str
    sequence: int
    """Rises from event to event. After a break, `jobs.watch(request_id, after=sequence)` goes on."""


@dataclass(frozen=True)
class Queued(Event):
    """The request was accepted and waits. Comes again when its place in the queue has changed."""

    params: Params
    images_ahead: int
    position: int
    """Requests that wait in front of it."""
    estimated_start_seconds: Optional[float]
    estimated_total_seconds: Optional[float]
    """From now; None while nothing has been measured."""


@dataclass(frozen=True)
class Started(Event):
    """The first image has a place on the device."""

    queued_seconds: float


@dataclass(frozen=True)
class Progress(Event):
    """How far the request is."""

    evaluations_done: int
    """Over all images of the request."""
    evaluations_total: int


@dataclass(frozen=True)
class Preview(Event):
    """An image in the making."""

    evaluation: int
    """Evaluations of this image done so far."""
    evaluations: int
    image: Image


@dataclass(frozen=True)
class ImageReady(Event):
    """An image is done."""

    image: Image


@dataclass(frozen=True)
class Completed(Event):
    """All images are done; the last event."""

    params: Params
    timing: Timing
    timeline: List[TimelineEntry] = field(repr=False)


@dataclass(frozen=True)
class Job:
    """A request's life on the server."""

    request_id: str
    client: str
    """Whose it is."""
    state: str
    """"queued", "running", "succeeded", "failed" or "cancelled"."""
    params: Params
    create_time: datetime
    start_time: Optional[datetime]
    end_time: Optional[datetime]
    expire_time: Optional[datetime]
    """Until when its result is kept."""
    evaluations_done: int
    evaluations_total: int
    images_done: int
    last_sequence: int
    """Of its latest event."""
    error: str
    """Why it failed or was cancelled."""


@dataclass(frozen=True)
class ModelDefaults:
    """What a request gets when it asks for nothing."""

    sampler: str
    noise_schedule: str
    steps: int
    guidance_scale: float
    width: int
    height: int
    strength: float
    """Of an init image without a mask; 0 for models without `ModelCapabilities.strength`."""
    image_guidance_scale: float
    """0 for models without `ModelCapabilities.image_guidance`."""


@dataclass(frozen=True)
class ModelCapabilities:
    """What a model reads and can do."""

    text: bool
    """It reads prompts."""
    second_text: bool
    """It reads prompt_2 and negative_prompt_2."""
    class_label: bool
    class_vector: bool
    size_conditions: bool
    """It reads original_size, crop and target_size."""
    guidance: bool
    """guidance_scale may exceed 1."""
    guidance_interval: bool
    """It takes guidance_start and guidance_stop."""
    guidance_rescale: bool
    image_guidance: bool
    """It takes an image_guidance_scale."""
    init_image: bool
    init_image_required: bool
    strength: bool
    """It can start from the init_image."""
    mask: bool
    mask_required: bool


@dataclass(frozen=True)
class ModelLimits:
    """What a request may ask."""

    max_steps: int
    """Of the default sampler."""
    max_count: int
    num_classes: int
    class_vector_size: int
    size_multiple: int
    """Width and height must be multiples of it."""
    channels: int
    max_request_bytes: int
    max_edge: int
    max_pixels: int
    max_evaluations: int
    """Of one image; a step may take two."""
    max_tensor_bytes: int
    max_previews_per_second: Optional[float]
    latent_factor: int
    """Pixels along an edge that a pixel of the latents stands for; 1: it draws pixels."""
    latent_channels: int
    """Of initial_noise."""
    max_clip_skip: int
    max_chunks: int
    """Chunks of a text that are read; 0 for models that read no text."""
    chunk_tokens: int
    """Tokens of a text in a chunk."""


@dataclass(frozen=True)
class Model:
    """A version of a model on the server."""

    name: str
    version: str
    current: bool
    """Whether `name` alone means this version."""
    aliases: Tuple[str, ...]
    state: str
    """"loading", "available", "failed" or "unloading"."""
    error: str
    architecture: str
    """diffusers' class of the denoiser."""
    pipeline: str
    """diffusers' class of the whole; empty for a model alone."""
    parameters: int
    capabilities: ModelCapabilities
    precision: str
    """In what the layers of its denoiser multiply: "fp32", "bf16" or "fp8"."""
    labels: Tuple[str, ...]
    """Names of the classes by index; may be empty."""
    defaults: ModelDefaults
    limits: ModelLimits
    samplers: Tuple[str, ...]
    noise_schedules: Tuple[str, ...]
    stages: Tuple[str, ...]
    """"condition", "encode", "denoise" and "decode", as far as it has them."""
    preview_decoders: Tuple[str, ...]
    """Of latents; empty: its state is the image."""
    memory_bytes: int
    device: str


@dataclass(frozen=True)
class Device:
    """One of the devices that draw."""

    name: str
    description: str
    error: str
    """Why it is lost; empty while it works."""


@dataclass(frozen=True)
class ServerInfo:
    """What the server is and allows."""

    version: str
    build: str
    state: str
    """"starting", "serving", "lame_duck" or "draining"."""
    devices: Tuple[Device, ...]
    start_time: datetime
    uptime_seconds: float
    features: Tuple[str, ...]
    """"tls", "tokens", "model_admin", …"""
    limits: Mapping[str, float]
    """By their names in the wire contract; what is missing has no limit."""
    client: str
    """Who the caller is to the server."""
    batching: str
