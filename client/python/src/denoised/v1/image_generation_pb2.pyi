# SPDX-License-Identifier: Apache-2.0
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from denoised.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DATA_TYPE_FLOAT32: DataType
DATA_TYPE_UINT8: DataType
DATA_TYPE_UNSPECIFIED: DataType
DESCRIPTOR: _descriptor.FileDescriptor
DISCONNECT_POLICY_CANCEL: DisconnectPolicy
DISCONNECT_POLICY_CONTINUE: DisconnectPolicy
DISCONNECT_POLICY_UNSPECIFIED: DisconnectPolicy
IMAGE_FORMAT_JPEG: ImageFormat
IMAGE_FORMAT_PNG: ImageFormat
IMAGE_FORMAT_RAW_FLOAT32: ImageFormat
IMAGE_FORMAT_RAW_UINT8: ImageFormat
IMAGE_FORMAT_UNSPECIFIED: ImageFormat
IMAGE_FORMAT_WEBP: ImageFormat
JOB_STATE_CANCELLED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_SUCCEEDED: JobState
JOB_STATE_UNSPECIFIED: JobState
MODEL_STATE_AVAILABLE: ModelState
MODEL_STATE_FAILED: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_UNLOADING: ModelState
MODEL_STATE_UNSPECIFIED: ModelState
NOISE_SCHEDULE_BETA: NoiseSchedule
NOISE_SCHEDULE_EXPONENTIAL: NoiseSchedule
NOISE_SCHEDULE_KARRAS: NoiseSchedule
NOISE_SCHEDULE_NATIVE: NoiseSchedule
NOISE_SCHEDULE_UNSPECIFIED: NoiseSchedule
PREVIEW_DECODER_LINEAR: PreviewDecoder
PREVIEW_DECODER_TINY: PreviewDecoder
PREVIEW_DECODER_UNSPECIFIED: PreviewDecoder
PREVIEW_KIND_NOISY_STATE: PreviewKind
PREVIEW_KIND_PREDICTED_X0: PreviewKind
PREVIEW_KIND_UNSPECIFIED: PreviewKind
PRIORITY_BATCH: Priority
PRIORITY_INTERACTIVE: Priority
PRIORITY_NORMAL: Priority
PRIORITY_UNSPECIFIED: Priority
SAMPLER_CONSISTENCY: Sampler
SAMPLER_DDIM: Sampler
SAMPLER_DDPM: Sampler
SAMPLER_DEIS: Sampler
SAMPLER_DPMPP_SDE: Sampler
SAMPLER_DPM_SOLVER: Sampler
SAMPLER_DPM_SOLVER_SDE: Sampler
SAMPLER_DPM_SOLVER_SINGLESTEP: Sampler
SAMPLER_EDM_DPM_SOLVER: Sampler
SAMPLER_EDM_EULER: Sampler
SAMPLER_EULER: Sampler
SAMPLER_EULER_ANCESTRAL: Sampler
SAMPLER_FLOW_MATCH_EULER: Sampler
SAMPLER_HEUN: Sampler
SAMPLER_KDPM2: Sampler
SAMPLER_KDPM2_ANCESTRAL: Sampler
SAMPLER_LCM: Sampler
SAMPLER_LMS: Sampler
SAMPLER_PNDM: Sampler
SAMPLER_SA_SOLVER: Sampler
SAMPLER_SCORE_SDE_VE: Sampler
SAMPLER_TCD: Sampler
SAMPLER_UNI_PC: Sampler
SAMPLER_UNSPECIFIED: Sampler
SERVER_FEATURE_MODEL_ADMIN: ServerFeature
SERVER_FEATURE_MODEL_RELOAD: ServerFeature
SERVER_FEATURE_MUTUAL_TLS: ServerFeature
SERVER_FEATURE_REFLECTION: ServerFeature
SERVER_FEATURE_TLS: ServerFeature
SERVER_FEATURE_TOKENS: ServerFeature
SERVER_FEATURE_UNSPECIFIED: ServerFeature
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_LAME_DUCK: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_STARTING: ServerState
SERVER_STATE_UNSPECIFIED: ServerState
STAGE_CONDITION: Stage
STAGE_DECODE: Stage
STAGE_DENOISE: Stage
STAGE_ENCODE: Stage
STAGE_UNSPECIFIED: Stage

class CancelJobRequest(_message.Message):
    __slots__ = ["request_id"]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ["job"]
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class CompletedEvent(_message.Message):
    __slots__ = ["params", "run", "timeline", "timing"]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    params: GenerationParams
    run: Run
    timeline: Timeline
    timing: Timing
    def __init__(self, params: _Optional[_Union[GenerationParams, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ["class_label", "class_vector", "negative_text", "negative_text_2", "text", "text_2"]
    CLASS_LABEL_FIELD_NUMBER: _ClassVar[int]
    CLASS_VECTOR_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_TEXT_2_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_2_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    class_label: int
    class_vector: _containers.RepeatedScalarFieldContainer[float]
    negative_text: str
    negative_text_2: str
    text: str
    text_2: str
    def __init__(self, text: _Optional[str] = ..., negative_text: _Optional[str] = ..., text_2: _Optional[str] = ..., negative_text_2: _Optional[str] = ..., class_label: _Optional[int] = ..., class_vector: _Optional[_Iterable[float]] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ["description", "error", "name"]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    description: str
    error: str
    name: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ["params"]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    params: GenerationParams
    def __init__(self, params: _Optional[_Union[GenerationParams, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ["images", "params", "run", "timeline", "timing", "traceparent"]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    images: _containers.RepeatedCompositeFieldContainer[Image]
    params: GenerationParams
    run: Run
    timeline: Timeline
    timing: Timing
    traceparent: str
    def __init__(self, params: _Optional[_Union[GenerationParams, _Mapping]] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ..., traceparent: _Optional[str] = ..., run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class GenerationParams(_message.Message):
    __slots__ = ["conditions", "count", "disconnect_policy", "eta", "guidance_rescale", "guidance_scale", "guidance_start", "guidance_stop", "height", "image_guidance_scale", "include_timings", "init_image", "initial_noise", "mask", "model", "noise_schedule", "output", "priority", "request_id", "s_churn", "s_noise", "s_tmax", "s_tmin", "sampler", "seed", "seeds", "size_conditions", "solver_order", "steps", "text_options", "width"]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DISCONNECT_POLICY_FIELD_NUMBER: _ClassVar[int]
    ETA_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_RESCALE_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_SCALE_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_START_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_STOP_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_GUIDANCE_SCALE_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_NOISE_FIELD_NUMBER: _ClassVar[int]
    INIT_IMAGE_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NOISE_SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SIZE_CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    SOLVER_ORDER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    S_CHURN_FIELD_NUMBER: _ClassVar[int]
    S_NOISE_FIELD_NUMBER: _ClassVar[int]
    S_TMAX_FIELD_NUMBER: _ClassVar[int]
    S_TMIN_FIELD_NUMBER: _ClassVar[int]
    TEXT_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    count: int
    disconnect_policy: DisconnectPolicy
    eta: float
    guidance_rescale: float
    guidance_scale: float
    guidance_start: float
    guidance_stop: float
    height: int
    image_guidance_scale: float
    include_timings: bool
    init_image: InitImage
    initial_noise: Tensor
    mask: Mask
    model: str
    noise_schedule: NoiseSchedule
    output: OutputOptions
    priority: Priority
    request_id: str
    s_churn: float
    s_noise: float
    s_tmax: float
    s_tmin: float
    sampler: Sampler
    seed: int
    seeds: _containers.RepeatedScalarFieldContainer[int]
    size_conditions: SizeConditions
    solver_order: int
    steps: int
    text_options: TextOptions
    width: int
    def __init__(self, model: _Optional[str] = ..., request_id: _Optional[str] = ..., seed: _Optional[int] = ..., count: _Optional[int] = ..., conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ..., text_options: _Optional[_Union[TextOptions, _Mapping]] = ..., guidance_scale: _Optional[float] = ..., steps: _Optional[int] = ..., sampler: _Optional[_Union[Sampler, str]] = ..., noise_schedule: _Optional[_Union[NoiseSchedule, str]] = ..., eta: _Optional[float] = ..., s_churn: _Optional[float] = ..., s_tmin: _Optional[float] = ..., s_tmax: _Optional[float] = ..., s_noise: _Optional[float] = ..., solver_order: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., initial_noise: _Optional[_Union[Tensor, _Mapping]] = ..., init_image: _Optional[_Union[InitImage, _Mapping]] = ..., priority: _Optional[_Union[Priority, str]] = ..., disconnect_policy: _Optional[_Union[DisconnectPolicy, str]] = ..., include_timings: bool = ..., seeds: _Optional[_Iterable[int]] = ..., mask: _Optional[_Union[Mask, _Mapping]] = ..., image_guidance_scale: _Optional[float] = ..., guidance_rescale: _Optional[float] = ..., guidance_start: _Optional[float] = ..., guidance_stop: _Optional[float] = ..., size_conditions: _Optional[_Union[SizeConditions, _Mapping]] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ["request_id"]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ["job"]
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ["name"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ["model"]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ["batching", "build", "client", "device", "device_description", "devices", "features", "limits", "start_time", "state", "uptime_seconds", "version"]
    BATCHING_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    batching: str
    build: str
    client: str
    device: str
    device_description: str
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    features: _containers.RepeatedScalarFieldContainer[ServerFeature]
    limits: ServerLimits
    start_time: _timestamp_pb2.Timestamp
    state: ServerState
    uptime_seconds: float
    version: str
    def __init__(self, version: _Optional[str] = ..., build: _Optional[str] = ..., state: _Optional[_Union[ServerState, str]] = ..., device: _Optional[str] = ..., device_description: _Optional[str] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., uptime_seconds: _Optional[float] = ..., features: _Optional[_Iterable[_Union[ServerFeature, str]]] = ..., limits: _Optional[_Union[ServerLimits, _Mapping]] = ..., client: _Optional[str] = ..., batching: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ["class_label", "encoded", "height", "index", "mime_type", "seed", "tensor", "width"]
    CLASS_LABEL_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    class_label: int
    encoded: bytes
    height: int
    index: int
    mime_type: str
    seed: int
    tensor: Tensor
    width: int
    def __init__(self, index: _Optional[int] = ..., seed: _Optional[int] = ..., class_label: _Optional[int] = ..., mime_type: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., encoded: _Optional[bytes] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class ImageEvent(_message.Message):
    __slots__ = ["image"]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    image: Image
    def __init__(self, image: _Optional[_Union[Image, _Mapping]] = ...) -> None: ...

class ImagePoint(_message.Message):
    __slots__ = ["left", "top"]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    left: int
    top: int
    def __init__(self, top: _Optional[int] = ..., left: _Optional[int] = ...) -> None: ...

class ImageSize(_message.Message):
    __slots__ = ["height", "width"]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ...) -> None: ...

class InitImage(_message.Message):
    __slots__ = ["encoded", "strength", "tensor"]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    encoded: bytes
    strength: float
    tensor: Tensor
    def __init__(self, encoded: _Optional[bytes] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ..., strength: _Optional[float] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ["client", "create_time", "end_time", "error", "expire_time", "images_done", "last_sequence", "params", "progress", "request_id", "run", "start_time", "state", "traceparent"]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    IMAGES_DONE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    client: str
    create_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    error: _status_pb2.Status
    expire_time: _timestamp_pb2.Timestamp
    images_done: int
    last_sequence: int
    params: GenerationParams
    progress: ProgressEvent
    request_id: str
    run: Run
    start_time: _timestamp_pb2.Timestamp
    state: JobState
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., params: _Optional[_Union[GenerationParams, _Mapping]] = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., progress: _Optional[_Union[ProgressEvent, _Mapping]] = ..., images_done: _Optional[int] = ..., last_sequence: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., traceparent: _Optional[str] = ..., client: _Optional[str] = ..., run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ["all_clients", "page_size", "page_token"]
    ALL_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    all_clients: bool
    page_size: int
    page_token: str
    def __init__(self, all_clients: bool = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ["jobs", "next_page_token"]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    next_page_token: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ["models"]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Mask(_message.Message):
    __slots__ = ["encoded", "tensor", "transparency"]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    TRANSPARENCY_FIELD_NUMBER: _ClassVar[int]
    encoded: bytes
    tensor: Tensor
    transparency: bytes
    def __init__(self, encoded: _Optional[bytes] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ..., transparency: _Optional[bytes] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ["aliases", "architecture", "capabilities", "current", "defaults", "device", "error", "labels", "limits", "memory_bytes", "name", "noise_schedules", "parameters", "pipeline", "precision", "preview_decoders", "samplers", "stages", "state", "version"]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NOISE_SCHEDULES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_DECODERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLERS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    aliases: _containers.RepeatedScalarFieldContainer[str]
    architecture: str
    capabilities: ModelCapabilities
    current: bool
    defaults: ModelDefaults
    device: str
    error: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    limits: ModelLimits
    memory_bytes: int
    name: str
    noise_schedules: _containers.RepeatedScalarFieldContainer[NoiseSchedule]
    parameters: int
    pipeline: str
    precision: str
    preview_decoders: _containers.RepeatedScalarFieldContainer[PreviewDecoder]
    samplers: _containers.RepeatedScalarFieldContainer[Sampler]
    stages: _containers.RepeatedScalarFieldContainer[Stage]
    state: ModelState
    version: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., error: _Optional[str] = ..., architecture: _Optional[str] = ..., parameters: _Optional[int] = ..., capabilities: _Optional[_Union[ModelCapabilities, _Mapping]] = ..., labels: _Optional[_Iterable[str]] = ..., defaults: _Optional[_Union[ModelDefaults, _Mapping]] = ..., limits: _Optional[_Union[ModelLimits, _Mapping]] = ..., samplers: _Optional[_Iterable[_Union[Sampler, str]]] = ..., noise_schedules: _Optional[_Iterable[_Union[NoiseSchedule, str]]] = ..., memory_bytes: _Optional[int] = ..., device: _Optional[str] = ..., version: _Optional[str] = ..., current: bool = ..., aliases: _Optional[_Iterable[str]] = ..., pipeline: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[Stage, str]]] = ..., preview_decoders: _Optional[_Iterable[_Union[PreviewDecoder, str]]] = ..., precision: _Optional[str] = ...) -> None: ...

class ModelCapabilities(_message.Message):
    __slots__ = ["class_label", "class_vector", "guidance", "guidance_interval", "guidance_rescale", "image_guidance", "init_image", "init_image_required", "mask", "mask_required", "second_text", "size_conditions", "strength", "text"]
    CLASS_LABEL_FIELD_NUMBER: _ClassVar[int]
    CLASS_VECTOR_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_RESCALE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_GUIDANCE_FIELD_NUMBER: _ClassVar[int]
    INIT_IMAGE_FIELD_NUMBER: _ClassVar[int]
    INIT_IMAGE_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    MASK_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXT_FIELD_NUMBER: _ClassVar[int]
    SIZE_CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    class_label: bool
    class_vector: bool
    guidance: bool
    guidance_interval: bool
    guidance_rescale: bool
    image_guidance: bool
    init_image: bool
    init_image_required: bool
    mask: bool
    mask_required: bool
    second_text: bool
    size_conditions: bool
    strength: bool
    text: bool
    def __init__(self, text: bool = ..., second_text: bool = ..., class_label: bool = ..., class_vector: bool = ..., size_conditions: bool = ..., guidance: bool = ..., guidance_rescale: bool = ..., image_guidance: bool = ..., init_image: bool = ..., init_image_required: bool = ..., strength: bool = ..., mask: bool = ..., mask_required: bool = ..., guidance_interval: bool = ...) -> None: ...

class ModelDefaults(_message.Message):
    __slots__ = ["guidance_scale", "height", "image_guidance_scale", "noise_schedule", "sampler", "steps", "strength", "width"]
    GUIDANCE_SCALE_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_GUIDANCE_SCALE_FIELD_NUMBER: _ClassVar[int]
    NOISE_SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    guidance_scale: float
    height: int
    image_guidance_scale: float
    noise_schedule: NoiseSchedule
    sampler: Sampler
    steps: int
    strength: float
    width: int
    def __init__(self, sampler: _Optional[_Union[Sampler, str]] = ..., noise_schedule: _Optional[_Union[NoiseSchedule, str]] = ..., steps: _Optional[int] = ..., guidance_scale: _Optional[float] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., strength: _Optional[float] = ..., image_guidance_scale: _Optional[float] = ...) -> None: ...

class ModelLimits(_message.Message):
    __slots__ = ["channels", "chunk_tokens", "class_vector_size", "latent_channels", "latent_factor", "max_chunks", "max_clip_skip", "max_count", "max_edge", "max_evaluations", "max_pixels", "max_previews_per_second", "max_request_bytes", "max_steps", "max_tensor_bytes", "num_classes", "size_multiple"]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLASS_VECTOR_SIZE_FIELD_NUMBER: _ClassVar[int]
    LATENT_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    LATENT_FACTOR_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    MAX_CLIP_SKIP_FIELD_NUMBER: _ClassVar[int]
    MAX_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_EDGE_FIELD_NUMBER: _ClassVar[int]
    MAX_EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PREVIEWS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_TENSOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CLASSES_FIELD_NUMBER: _ClassVar[int]
    SIZE_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    channels: int
    chunk_tokens: int
    class_vector_size: int
    latent_channels: int
    latent_factor: int
    max_chunks: int
    max_clip_skip: int
    max_count: int
    max_edge: int
    max_evaluations: int
    max_pixels: int
    max_previews_per_second: float
    max_request_bytes: int
    max_steps: int
    max_tensor_bytes: int
    num_classes: int
    size_multiple: int
    def __init__(self, max_steps: _Optional[int] = ..., max_count: _Optional[int] = ..., num_classes: _Optional[int] = ..., class_vector_size: _Optional[int] = ..., size_multiple: _Optional[int] = ..., channels: _Optional[int] = ..., max_request_bytes: _Optional[int] = ..., max_edge: _Optional[int] = ..., max_pixels: _Optional[int] = ..., max_evaluations: _Optional[int] = ..., max_tensor_bytes: _Optional[int] = ..., max_previews_per_second: _Optional[float] = ..., latent_factor: _Optional[int] = ..., latent_channels: _Optional[int] = ..., max_clip_skip: _Optional[int] = ..., max_chunks: _Optional[int] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ["embed_metadata", "format", "quality"]
    EMBED_METADATA_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    embed_metadata: bool
    format: ImageFormat
    quality: int
    def __init__(self, format: _Optional[_Union[ImageFormat, str]] = ..., quality: _Optional[int] = ..., embed_metadata: bool = ...) -> None: ...

class PreviewEvent(_message.Message):
    __slots__ = ["evaluation", "evaluations", "image"]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    evaluation: int
    evaluations: int
    image: Image
    def __init__(self, evaluation: _Optional[int] = ..., evaluations: _Optional[int] = ..., image: _Optional[_Union[Image, _Mapping]] = ...) -> None: ...

class PreviewOptions(_message.Message):
    __slots__ = ["decoder", "every_evaluations", "format", "kind", "max_edge"]
    DECODER_FIELD_NUMBER: _ClassVar[int]
    EVERY_EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MAX_EDGE_FIELD_NUMBER: _ClassVar[int]
    decoder: PreviewDecoder
    every_evaluations: int
    format: ImageFormat
    kind: PreviewKind
    max_edge: int
    def __init__(self, kind: _Optional[_Union[PreviewKind, str]] = ..., every_evaluations: _Optional[int] = ..., max_edge: _Optional[int] = ..., format: _Optional[_Union[ImageFormat, str]] = ..., decoder: _Optional[_Union[PreviewDecoder, str]] = ...) -> None: ...

class ProgressEvent(_message.Message):
    __slots__ = ["evaluations_done", "evaluations_total"]
    EVALUATIONS_DONE_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    evaluations_done: int
    evaluations_total: int
    def __init__(self, evaluations_done: _Optional[int] = ..., evaluations_total: _Optional[int] = ...) -> None: ...

class QueuedEvent(_message.Message):
    __slots__ = ["estimated_start_seconds", "estimated_total_seconds", "images_ahead", "params", "position", "run", "traceparent"]
    ESTIMATED_START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_AHEAD_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    estimated_start_seconds: float
    estimated_total_seconds: float
    images_ahead: int
    params: GenerationParams
    position: int
    run: Run
    traceparent: str
    def __init__(self, params: _Optional[_Union[GenerationParams, _Mapping]] = ..., images_ahead: _Optional[int] = ..., position: _Optional[int] = ..., estimated_start_seconds: _Optional[float] = ..., estimated_total_seconds: _Optional[float] = ..., traceparent: _Optional[str] = ..., run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ["evaluations", "model_version", "steps", "texts"]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    evaluations: int
    model_version: str
    steps: int
    texts: _containers.RepeatedCompositeFieldContainer[TextRead]
    def __init__(self, model_version: _Optional[str] = ..., steps: _Optional[int] = ..., evaluations: _Optional[int] = ..., texts: _Optional[_Iterable[_Union[TextRead, _Mapping]]] = ...) -> None: ...

class ServerLimits(_message.Message):
    __slots__ = ["drain_grace_seconds", "job_retention_seconds", "max_connection_age_seconds", "max_connection_idle_seconds", "max_count", "max_init_pixels", "max_kept_job_bytes", "max_previews_per_second", "max_queued_bytes", "max_queued_images", "max_queued_requests", "max_queued_requests_per_client", "max_reply_bytes", "max_request_bytes", "max_steps", "max_streams_per_client", "max_streams_per_connection", "max_tensor_bytes", "min_ping_interval_seconds", "write_timeout_seconds"]
    DRAIN_GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    JOB_RETENTION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONNECTION_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONNECTION_IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_INIT_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_KEPT_JOB_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PREVIEWS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_PER_CLIENT_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_PER_CLIENT_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_PER_CONNECTION_FIELD_NUMBER: _ClassVar[int]
    MAX_TENSOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    MIN_PING_INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WRITE_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    drain_grace_seconds: float
    job_retention_seconds: float
    max_connection_age_seconds: float
    max_connection_idle_seconds: float
    max_count: int
    max_init_pixels: int
    max_kept_job_bytes: int
    max_previews_per_second: float
    max_queued_bytes: int
    max_queued_images: int
    max_queued_requests: int
    max_queued_requests_per_client: int
    max_reply_bytes: int
    max_request_bytes: int
    max_steps: int
    max_streams_per_client: int
    max_streams_per_connection: int
    max_tensor_bytes: int
    min_ping_interval_seconds: float
    write_timeout_seconds: float
    def __init__(self, max_request_bytes: _Optional[int] = ..., max_reply_bytes: _Optional[int] = ..., max_init_pixels: _Optional[int] = ..., max_tensor_bytes: _Optional[int] = ..., max_count: _Optional[int] = ..., max_steps: _Optional[int] = ..., max_previews_per_second: _Optional[float] = ..., max_queued_requests: _Optional[int] = ..., max_queued_images: _Optional[int] = ..., max_queued_bytes: _Optional[int] = ..., max_queued_requests_per_client: _Optional[int] = ..., max_streams_per_client: _Optional[int] = ..., max_streams_per_connection: _Optional[int] = ..., write_timeout_seconds: _Optional[float] = ..., min_ping_interval_seconds: _Optional[float] = ..., max_connection_idle_seconds: _Optional[float] = ..., max_connection_age_seconds: _Optional[float] = ..., job_retention_seconds: _Optional[float] = ..., max_kept_job_bytes: _Optional[int] = ..., drain_grace_seconds: _Optional[float] = ...) -> None: ...

class SizeConditions(_message.Message):
    __slots__ = ["crop", "original_size", "target_size"]
    CROP_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_SIZE_FIELD_NUMBER: _ClassVar[int]
    crop: ImagePoint
    original_size: ImageSize
    target_size: ImageSize
    def __init__(self, original_size: _Optional[_Union[ImageSize, _Mapping]] = ..., crop: _Optional[_Union[ImagePoint, _Mapping]] = ..., target_size: _Optional[_Union[ImageSize, _Mapping]] = ...) -> None: ...

class StartedEvent(_message.Message):
    __slots__ = ["queued_seconds"]
    QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queued_seconds: float
    def __init__(self, queued_seconds: _Optional[float] = ...) -> None: ...

class StreamGenerateRequest(_message.Message):
    __slots__ = ["params", "preview"]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    params: GenerationParams
    preview: PreviewOptions
    def __init__(self, params: _Optional[_Union[GenerationParams, _Mapping]] = ..., preview: _Optional[_Union[PreviewOptions, _Mapping]] = ...) -> None: ...

class StreamGenerateResponse(_message.Message):
    __slots__ = ["completed", "image", "preview", "progress", "queued", "request_id", "sequence", "started"]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    completed: CompletedEvent
    image: ImageEvent
    preview: PreviewEvent
    progress: ProgressEvent
    queued: QueuedEvent
    request_id: str
    sequence: int
    started: StartedEvent
    def __init__(self, sequence: _Optional[int] = ..., request_id: _Optional[str] = ..., queued: _Optional[_Union[QueuedEvent, _Mapping]] = ..., started: _Optional[_Union[StartedEvent, _Mapping]] = ..., progress: _Optional[_Union[ProgressEvent, _Mapping]] = ..., preview: _Optional[_Union[PreviewEvent, _Mapping]] = ..., image: _Optional[_Union[ImageEvent, _Mapping]] = ..., completed: _Optional[_Union[CompletedEvent, _Mapping]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ["data", "data_type", "shape"]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    data_type: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, data_type: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class TextOptions(_message.Message):
    __slots__ = ["clip_skip", "max_chunks"]
    CLIP_SKIP_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    clip_skip: int
    max_chunks: int
    def __init__(self, clip_skip: _Optional[int] = ..., max_chunks: _Optional[int] = ...) -> None: ...

class TextRead(_message.Message):
    __slots__ = ["cut_off", "cut_off_2", "negative_cut_off", "negative_cut_off_2", "tokens"]
    CUT_OFF_2_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_CUT_OFF_2_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    cut_off: str
    cut_off_2: str
    negative_cut_off: str
    negative_cut_off_2: str
    tokens: int
    def __init__(self, tokens: _Optional[int] = ..., cut_off: _Optional[str] = ..., negative_cut_off: _Optional[str] = ..., cut_off_2: _Optional[str] = ..., negative_cut_off_2: _Optional[str] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ["entries"]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[TimelineEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[TimelineEntry, _Mapping]]] = ...) -> None: ...

class TimelineEntry(_message.Message):
    __slots__ = ["device_seconds", "evaluations", "image_index", "milestone", "seconds", "stage"]
    class Milestone(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = []
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MILESTONE_ADMITTED: TimelineEntry.Milestone
    MILESTONE_DECODED: TimelineEntry.Milestone
    MILESTONE_EVALUATION: TimelineEntry.Milestone
    MILESTONE_FIELD_NUMBER: _ClassVar[int]
    MILESTONE_QUEUED: TimelineEntry.Milestone
    MILESTONE_SENT: TimelineEntry.Milestone
    MILESTONE_STAGE: TimelineEntry.Milestone
    MILESTONE_UNSPECIFIED: TimelineEntry.Milestone
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    device_seconds: float
    evaluations: int
    image_index: int
    milestone: TimelineEntry.Milestone
    seconds: float
    stage: Stage
    def __init__(self, milestone: _Optional[_Union[TimelineEntry.Milestone, str]] = ..., seconds: _Optional[float] = ..., evaluations: _Optional[int] = ..., image_index: _Optional[int] = ..., stage: _Optional[_Union[Stage, str]] = ..., device_seconds: _Optional[float] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ["queued_seconds", "total_seconds"]
    QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queued_seconds: float
    total_seconds: float
    def __init__(self, queued_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ["after_sequence", "request_id"]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    request_id: str
    def __init__(self, request_id: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class Sampler(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class NoiseSchedule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class ImageFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class DisconnectPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class PreviewKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class PreviewDecoder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class ServerFeature(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
