// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

/// Requests and replies in plain types. All are values, owned by whoever holds them. A parameter
/// that is unset takes the model's default; replies have the effective value. The server checks
/// ranges, which proto/denoised/v1/image_generation.proto documents. Members of requests have
/// initialisers, so that {.seed = 42} does not warn of the others (-Wextra).

namespace denoised::client {

/// How the model's output becomes the next state. The numbers are those of the wire contract.
enum class Sampler {
  kUnknown = 0,  // only in answers: a sampler that this version of the library has no name for
  kDdpm = 1,
  kDdim = 2,
  kPndm = 3,
  kEuler = 4,
  kEulerAncestral = 5,
  kLms = 6,
  kHeun = 7,
  kDpmSolver = 8,
  kDpmSolverSde = 9,
  kUniPc = 10,
  kLcm = 11,
  kEdmEuler = 12,
  kEdmDpmSolver = 13,
  kDpmppSde = 14,
  kDeis = 15,
  kKdpm2 = 16,
  kKdpm2Ancestral = 17,
  kTcd = 18,
  kDpmSolverSinglestep = 19,
  kFlowMatchEuler = 20,
  kConsistency = 21,
  kSaSolver = 22,
  kScoreSdeVe = 23,
};

/// How noise levels are spaced over the steps.
enum class NoiseSchedule { kUnknown = 0, kNative = 1, kKarras = 2, kExponential = 3, kBeta = 4 };

/// How an image is returned: a file, or an array [height, width, channels].
enum class ImageFormat {
  kPng = 1,
  kJpeg = 2,
  kWebp = 3,
  kRawFloat32 = 4,  // nominally in [-1, 1], not clipped
  kRawUint8 = 5,    // in [0, 255]
};

enum class PreviewKind { kPredictedX0 = 1, kNoisyState = 2 };

/// What makes previews of latents.
enum class PreviewDecoder {
  kUnknown = 0,
  kLinear = 1,  // a colour for each latent pixel
  kTiny = 2     // the small autoencoder beside the model's own
};
std::string_view Name(PreviewDecoder decoder);

/// What a pipeline does for an image.
enum class Stage { kUnknown = 0, kCondition = 1, kEncode = 2, kDenoise = 3, kDecode = 4 };
std::string_view Name(Stage stage);

enum class ModelState { kUnknown = 0, kLoading = 1, kAvailable = 2, kFailed = 3, kUnloading = 4 };

/// Who goes first when requests wait.
enum class Priority { kInteractive = 1, kNormal = 2, kBatch = 3 };

/// Life of a job.
enum class JobState {
  kUnknown = 0,
  kQueued = 1,
  kRunning = 2,
  kSucceeded = 3,
  kFailed = 4,
  kCancelled = 5
};

/// Lower-case names: "dpm_solver", "karras", "available"; "unknown" for what has none.
std::string_view Name(Sampler sampler);
std::string_view Name(NoiseSchedule schedule);
std::string_view Name(Priority priority);
std::string_view Name(ModelState state);
std::string_view Name(JobState state);
std::optional<Sampler> SamplerFromName(std::string_view name);
std::optional<NoiseSchedule> NoiseScheduleFromName(std::string_view name);
std::optional<Priority> PriorityFromName(std::string_view name);
/// In the order of the contract, without kUnknown.
std::vector<Sampler> AllSamplers();
std::vector<NoiseSchedule> AllNoiseSchedules();
std::vector<Priority> AllPriorities();

/// An array, row-major, little-endian; `data` holds product(shape) elements.
struct Tensor {
  enum class Type { kFloat32 = 1, kUint8 = 2 };
  Type type = Type::kFloat32;
  std::vector<int64_t> shape = {};
  std::string data = {};
};

/// Image to image: start from a picture instead of noise.
struct InitImage {
  /// A PNG, JPEG or WebP file; or [height, width, channels].
  std::variant<std::string, Tensor> source = {};
  std::optional<double> strength = {};  // how much is drawn anew, in (0, 1]
};

/// Inpainting: where the init image is drawn anew. Of the init image's size.
struct Mask {
  /// A PNG, JPEG or WebP file, white where it is drawn anew; or [height, width], float32 in [0, 1]
  /// or uint8.
  std::variant<std::string, Tensor> source = {};
};

/// What an image shows, in words, for models that read text. UTF-8.
struct Prompt {
  std::string text = {};
  std::optional<std::string> negative = {};  // what it does not show; unset: the model's default
  /// For a second text encoder; unset or empty: as the first.
  std::optional<std::string> text_2 = {}, negative_2 = {};
};

/// How much of a Prompt the model reads.
struct TextRead {
  int tokens = 0;       // of `text`
  std::string cut_off;  // the end of `text` that it does not read
  std::string negative_cut_off, text_2_cut_off, negative_2_cut_off;  // of the others
};

/// What SDXL is told of a picture's history, as height and width (crop: top and left). Unset: the
/// image's own size, and no crop.
struct SizeConditions {
  std::optional<std::array<int, 2>> original_size = {}, crop = {}, target_size = {};
};

/// What to draw.
struct Generation {
  std::string model = {};  // name, name@version or alias; may be empty when there is a single one
  std::string request_id = {};        // at most 128 printable ASCII characters: a request that is
                                      // repeated with the same id is drawn once; empty: one is made
  std::optional<uint64_t> seed = {};  // image i has seed + i; unset: the connection draws one
  std::vector<uint64_t> seeds = {};   // instead, one for each of `count` images
  std::optional<int> count = {};
  // What the images show: one for all images, or one for each. A model reads one of the three.
  std::vector<int> class_labels = {};
  std::vector<std::vector<float>> class_vectors = {};  // numbers from -10000 to 10000
  std::vector<Prompt> prompts = {};
  SizeConditions sizes = {};           // for models that read them
  std::optional<int> clip_skip = {};   // of the prompts: text encoder layers left out at the end
  std::optional<int> max_chunks = {};  // of each text of the prompts; 1 reads as much as diffusers
  std::optional<double> guidance_scale = {};
  std::optional<double> image_guidance_scale = {};                // towards init_image
  std::optional<double> guidance_rescale = {};                    // 0 to 1
  std::optional<double> guidance_start = {}, guidance_stop = {};  // parts of the steps, 0 to 1
  std::optional<int> steps = {};
  std::optional<Sampler> sampler = {};
  std::optional<NoiseSchedule> noise_schedule = {};
  std::optional<double> eta = {};
  std::optional<double> s_churn = {}, s_tmin = {}, s_tmax = {}, s_noise = {};
  std::optional<int> solver_order = {};
  /// Pixels. By default those of init_image if there is one and no mask, else the model's.
  std::optional<int> width = {}, height = {};
  std::optional<ImageFormat> format = {};
  std::optional<int> quality = {};  // of JPEG and WebP, 1 to 100
  std::optional<bool> embed_metadata = {};
  /// float32 [count, height, width, channels] in standard normal scale, from -10000 to 10000.
  std::optional<Tensor> initial_noise = {};
  std::optional<InitImage> init_image = {};
  std::optional<Mask> mask = {};  // of init_image
  std::optional<Priority> priority = {};
  bool survives = false;         // continues as a job without a connection; see WatchJob, CancelJob
  bool include_timings = false;  // return a timeline
};

/// Previews of the denoising, for StreamGenerate.
struct PreviewOptions {
  PreviewKind kind = PreviewKind::kPredictedX0;
  std::optional<int> every_evaluations = {};
  std::optional<int> max_edge = {};  // pixels
  std::optional<ImageFormat> format = {};
  /// Unset: the small autoencoder, of models that have one.
  std::optional<PreviewDecoder> decoder = {};
};

/// The parameters of a run, with every default filled in.
struct EffectiveParams {
  /// Draws the same images when it is sent again. It has no bytes of pictures and noise: a request
  /// with init_image, mask or initial_noise needs them again.
  Generation request;
  std::string model, model_version;
  std::string request_id;
  uint64_t seed = 0;
  std::vector<uint64_t> seeds;  // of each image; empty when image i has seed + i
  int count = 0;
  std::vector<int> class_labels;  // of each image; empty when the model has none
  double guidance_scale = 1;      // 1: none
  // Unset where they had no part.
  std::optional<double> image_guidance_scale, guidance_rescale, guidance_start, guidance_stop;
  int steps = 0;        // that are run: fewer than request.steps from an init image
  int evaluations = 0;  // of the model, per image
  Sampler sampler = Sampler::kUnknown;
  NoiseSchedule noise_schedule = NoiseSchedule::kUnknown;
  int width = 0, height = 0;  // pixels
  double strength = 1;
  bool masked = false;  // a mask decided what was drawn anew
  double eta = 0;
  double s_churn = 0;
  std::optional<double> s_tmin, s_tmax, s_noise;  // unset when the sampler has no churn
  std::optional<int> solver_order;                // unset when the sampler has none
  std::vector<std::vector<float>> class_vectors;  // of each image; empty where the model has none
  std::vector<Prompt> prompts;                    // empty for models that read no text
  std::vector<TextRead> texts;                    // of each of `prompts`
  int max_chunks = 0;                             // of each text; 0 for models that read no text
};

/// One image.
struct Image {
  int index = 0;      // within the request, from 0
  uint64_t seed = 0;  // count 1 with this seed draws this image alone
  std::optional<int> class_label;
  std::string mime_type;      // "image/png"; "application/octet-stream" for a tensor
  int width = 0, height = 0;  // pixels
  std::variant<std::string, Tensor> content;  // the file; or [height, width, channels]
};

/// Where the time went.
struct Timing {
  double queued_seconds = 0;
  double total_seconds = 0;
};

/// One moment of a request's life.
struct TimelineEntry {
  enum class Milestone {
    kUnknown = 0,
    kQueued = 1,
    kAdmitted = 2,
    kEvaluation = 3,
    kDecoded = 4,
    kSent = 5,
    kStage = 6
  };
  Milestone milestone = Milestone::kUnknown;
  double seconds = 0;                    // since the request arrived
  std::optional<int> evaluations;        // kEvaluation: done, over all images
  std::optional<int> image_index;        // kStage, kDecoded, kSent
  Stage stage = Stage::kUnknown;         // kStage: which is done
  std::optional<double> device_seconds;  // kStage: what it took there, where that is known
};
std::string_view Name(TimelineEntry::Milestone milestone);

/// The answer of Generate; images by index.
struct GenerationResult {
  EffectiveParams params;
  std::vector<Image> images;
  Timing timing;
  std::vector<TimelineEntry> timeline;  // when include_timings asked for it
};

/// The events of StreamGenerate.
struct Queued {
  EffectiveParams params;
  int images_ahead = 0;
  int position = 0;  // requests that wait in front of it
  std::optional<double> estimated_start_seconds, estimated_total_seconds;  // from now
  std::string server;  // that accepted the job, "ipv4:10.0.0.1:50051": connect there to watch it
};
struct Started {
  double queued_seconds = 0;
};
struct Progress {
  int evaluations_done = 0;  // over all images of the request
  int evaluations_total = 0;
};
struct Preview {
  int evaluation = 0;  // evaluations of this image so far
  int evaluations = 0;
  Image image;
};
struct Completed {
  EffectiveParams params;
  Timing timing;
  std::vector<TimelineEntry> timeline;  // when include_timings asked for it
};
/// Queued, and again when its place has changed; Started, then Progress and Preview in any number,
/// each Image once, and Completed last. If the request is retried on another server, the listener
/// hears nothing until that server has caught up, and no event twice. Its images are the same, byte
/// for byte.
using Event = std::variant<Queued, Started, Progress, Preview, Image, Completed>;

/// A request's life on the server.
struct Job {
  std::string request_id;
  std::string client;  // whose it is
  JobState state = JobState::kUnknown;
  EffectiveParams params;
  // Seconds since 1970.
  double create_time = 0;
  std::optional<double> start_time, end_time, expire_time;
  Progress progress;
  int images_done = 0;
  uint64_t last_sequence = 0;  // of its latest event
  std::string error;           // why it failed or was cancelled
};

/// The jobs that ListJobs returns.
struct JobQuery {
  bool all_clients = false;  // for admins: the jobs of all clients, not only one's own
  int limit = 100;           // the latest; at least 1
};

/// One of the devices that draw.
struct Device {
  std::string name, description;
  std::string error;  // why it is lost; empty while it works
};

/// The server's version, state, features and limits.
struct ServerInfo {
  std::string version, build;
  std::string state;                       // "starting", "serving", "lame_duck", "draining"
  std::string device, device_description;  // of several "cuda:0,cuda:1", all of one kind
  std::vector<Device> devices;             // never empty
  double uptime_seconds = 0;
  std::string batching;                                // "step" or "request"
  std::string client;                                  // who the server takes the caller for
  std::vector<std::string> features;                   // "tls", "model_admin", ...
  std::vector<std::pair<std::string, double>> limits;  // by their names in the wire contract
};

/// A version of a model to load; see proto/denoised/v1/model_admin.proto.
struct ModelLoad {
  std::string name = {};
  std::string directory = {};  // on the server's disk; empty: where the current version came from
  std::string version = {};    // empty: the number after the highest
  bool keep_current = false;
  bool unload_previous = false;
};

/// A model on the server.
struct Model {
  std::string name, version;
  bool current = false;              // `name` alone means this version
  std::vector<std::string> aliases;  // other names for it
  ModelState state = ModelState::kUnknown;
  std::string error;         // why it is kFailed
  std::string architecture;  // diffusers' class of the denoiser
  std::string pipeline;      // diffusers' class of the whole; empty for a model alone
  int64_t parameters = 0;
  struct Capabilities {
    bool text = false;
    bool second_text = false;  // Prompt::text_2 and negative_2
    bool class_label = false;
    bool class_vector = false;
    bool size_conditions = false;
    bool guidance = false;
    bool guidance_interval = false;  // guidance_start and guidance_stop
    bool guidance_rescale = false;
    bool image_guidance = false;
    bool init_image = false, init_image_required = false;
    bool strength = false;  // it can start from the init image
    bool mask = false, mask_required = false;
  } capabilities;
  std::string precision;            // in what its layers multiply: "fp32", "bf16" or "fp8"
  std::vector<std::string> labels;  // names of the classes by index; may be empty
  struct Defaults {
    Sampler sampler = Sampler::kUnknown;
    NoiseSchedule noise_schedule = NoiseSchedule::kUnknown;
    int steps = 0;
    double guidance_scale = 1;
    int width = 0, height = 0;        // pixels
    double strength = 0;              // of an init image; 0: the model has no strength
    double image_guidance_scale = 0;  // 0: none
  } defaults;
  struct Limits {
    int max_steps = 0;  // of the default sampler
    int max_count = 0;
    int num_classes = 0;
    int class_vector_size = 0;
    int size_multiple = 1;
    int max_edge = 0;  // of an image, pixels
    int channels = 0;
    int64_t max_request_bytes = 0;
    int latent_factor = 1;    // pixels along an edge of one latent pixel; 1: it draws pixels
    int latent_channels = 0;  // of initial_noise
    int max_clip_skip = 0;
    int max_chunks = 0;    // of a text; 0 for models that read no text
    int chunk_tokens = 0;  // of a text, in a chunk
  } limits;
  std::vector<Sampler> samplers;
  std::vector<NoiseSchedule> noise_schedules;
  std::vector<Stage> stages;                     // in their order
  std::vector<PreviewDecoder> preview_decoders;  // of latents; empty: its state is the image
  int64_t memory_bytes = 0;
  std::string device;  // "cpu" or "cuda:0"
};

}  // namespace denoised::client
