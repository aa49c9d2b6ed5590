// SPDX-License-Identifier: Apache-2.0
// cuBLASLt at its fastest on the linear layers of backend-throughput: what those are compared with.
//
//   cublaslt-search [--precision=fp8] [--turns] [NAME…]
//                                           NAME as in linear/rows:64/tokens:256/in:256/out:768
//
// bf16, accumulated in fp32, with the bias in the epilogue and 32 MiB of workspace; with
// --precision=fp8 operands in e4m3, without fast accumulation, and outputs in bf16. For each shape
// it times up to 96 algorithms in CUDA graphs:
//   1. what cublasLtMatmulAlgoGetHeuristic returns when asked for 64 (cuBLASLt 13.1: eight of
//   them),
//   2. what it returns with less workspace, and for each algorithm of cublasLtMatmulAlgoGetIds,
//   3. the fastest so far with every other tile and number of stages that cuBLASLt accepts for it.
// The fastest of all is measured as backend-throughput measures its ops: random data, at least
// eight launches in a graph, activations that rotate through 256 MiB, the median of nine replays
// after 0.1 s of work. --turns measures when standard input says so (turns.h); otherwise one line
// of JSON for each NAME. A program for one GPU: it exits with a message on any error.

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "engine/core/e4m3.h"
#include "engine/core/tensor.h"
#include "tests/bench/turns.h"

namespace denoised {
namespace {

constexpr int kAsked = 64, kMostAlgorithms = 96;
constexpr size_t kWorkspace = size_t{32} << 20;
constexpr int64_t kRotatedBytes = 256 << 20;
constexpr int64_t kMostCopies = 128, kLeastLaunches = 8;
constexpr double kWarmUpSeconds = 0.1;
constexpr int kSamples = 9, kSearchSamples = 5;

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void Check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "%s: %s\n", what, cublasLtGetStatusString(status));
  std::exit(1);
}

class Buffer {
 public:
  explicit Buffer(size_t bytes) { Check(cudaMalloc(&data_, bytes), "cudaMalloc"); }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* at(int64_t bytes) const { return static_cast<std::byte*>(data_) + bytes; }

  /// Normal values, in bf16 or e4m3, that repeat with a prime period, so that no two rows are
  /// alike.
  void Fill(int64_t values, float deviation, bool e4m3) const {
    if (e4m3) return FillAs<uint8_t>(values, deviation, FloatToE4m3);
    FillAs<uint16_t>(values, deviation, FloatToBFloat16);
  }

 private:
  template <typename T>
  void FillAs(int64_t values, float deviation, T (*of)(float)) const {
    constexpr size_t kPeriod = 65521;
    std::mt19937 random{7};
    std::normal_distribution<float> normal(0, deviation);
    std::vector<T> period(kPeriod);
    for (T& value : period) value = of(normal(random));
    std::vector<T> all(static_cast<size_t>(values));
    for (size_t i = 0; i < all.size(); ++i) all[i] = period[i % kPeriod];
    Check(cudaMemcpy(data_, all.data(), all.size() * sizeof(T), cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }

  void* data_ = nullptr;
};

struct Shape {
  int64_t rows = 0, in = 0, out = 0;  // rows: of the matrix, so rows · tokens of the layer
};

std::optional<Shape> Parse(const std::string& name) {
  long long rows = 0, tokens = 0, in = 0, out = 0;
  if (std::sscanf(name.c_str(), "linear/rows:%lld/tokens:%lld/in:%lld/out:%lld", &rows, &tokens,
                  &in, &out) != 4)
    return std::nullopt;
  return Shape{rows * tokens, in, out};
}

/// One layer with its buffers; what cuBLASLt offers for it, and the fastest of that.
class Layer {
 public:
  Layer(cublasLtHandle_t handle, cudaStream_t stream, const Shape& shape, bool e4m3)
      : handle_(handle),
        stream_(stream),
        shape_(shape),
        operands_(e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_16BF),
        x_bytes_((e4m3 ? 1 : 2) * shape.rows * shape.in),
        y_bytes_(2 * shape.rows * shape.out),
        copies_(
            std::clamp<int64_t>((kRotatedBytes - 1) / (x_bytes_ + y_bytes_) + 1, 1, kMostCopies)),
        x_(copies_ * x_bytes_),
        y_(copies_ * y_bytes_),
        weight_((e4m3 ? 1 : 2) * shape.in * shape.out),
        bias_(2 * shape.out),
        workspace_(kWorkspace) {
    // Scales, which change no time, would bring numbers to the middle of e4m3's range.
    const float weight = e4m3 ? 16 : 1 / std::sqrt(static_cast<float>(shape.in));
    x_.Fill(copies_ * shape.rows * shape.in, e4m3 ? 16 : 1, e4m3);
    weight_.Fill(shape.in * shape.out, weight, e4m3);
    bias_.Fill(shape.out, 1, /*e4m3=*/false);
    // In cuBLAS's column-major view: y [out, rows] = weightᵀ [out, in] · x [in, rows].
    Check(cublasLtMatmulDescCreate(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor");
    const cublasOperation_t transposed = CUBLAS_OP_T;
    Set(CUBLASLT_MATMUL_DESC_TRANSA, transposed);
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    Set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    const void* bias = bias_.at(0);
    Set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    const cudaDataType_t bf16 = CUDA_R_16BF;
    Set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bf16);
    Check(cublasLtMatrixLayoutCreate(&a_, operands_, shape.in, shape.out, shape.in), "layout");
    Check(cublasLtMatrixLayoutCreate(&b_, operands_, shape.in, shape.rows, shape.in), "layout");
    Check(cublasLtMatrixLayoutCreate(&c_, bf16, shape.out, shape.rows, shape.out), "layout");
    Search();
  }
  ~Layer() {
    if (best_ != nullptr) cudaGraphExecDestroy(best_);
    cublasLtMatrixLayoutDestroy(c_);
    cublasLtMatrixLayoutDestroy(b_);
    cublasLtMatrixLayoutDestroy(a_);
    cublasLtMatmulDescDestroy(product_);
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  /// Microseconds of each algorithm in the order of the search; null where it failed.
  const nlohmann::json& found() const { return found_; }
  double Microseconds() const { return Median(best_, kWarmUpSeconds, kSamples); }

 private:
  template <typename T>
  void Set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    Check(cublasLtMatmulDescSetAttribute(product_, attribute, &value, sizeof(value)), "descriptor");
  }

  int64_t launches() const { return std::max(copies_, kLeastLaunches); }

  void Search() {
    found_ = nlohmann::json::array();
    Ask(kWorkspace);
    for (const size_t workspace : {size_t{0}, kWorkspace / 8}) Ask(workspace);
    std::vector<int> ids(kAsked);
    int count = 0;
    Check(cublasLtMatmulAlgoGetIds(handle_, CUBLAS_COMPUTE_32F, CUDA_R_32F, operands_, operands_,
                                   CUDA_R_16BF, CUDA_R_16BF, kAsked, ids.data(), &count),
          "cublasLtMatmulAlgoGetIds");
    ids.resize(count);
    for (const int id : ids) Ask(kWorkspace, id);
    if (best_ == nullptr) {
      std::fprintf(stderr, "cuBLASLt has no algorithm for %lld × %lld → %lld\n",
                   static_cast<long long>(shape_.rows), static_cast<long long>(shape_.in),
                   static_cast<long long>(shape_.out));
      std::exit(1);
    }
    const cublasLtMatmulAlgo_t fastest = best_algorithm_;
    for (const uint32_t tile : Capabilities(fastest, CUBLASLT_ALGO_CAP_TILE_IDS)) {
      for (const uint32_t stages : Capabilities(fastest, CUBLASLT_ALGO_CAP_STAGES_IDS)) {
        cublasLtMatmulAlgo_t algorithm = fastest;
        cublasLtMatmulHeuristicResult_t result;
        if (Configured(&algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, tile) &&
            Configured(&algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID, stages) &&
            cublasLtMatmulAlgoCheck(handle_, product_, a_, b_, c_, c_, &algorithm, &result) ==
                CUBLAS_STATUS_SUCCESS &&
            result.workspaceSize <= kWorkspace) {
          Time(algorithm);
        }
      }
    }
  }

  /// Times what the heuristics return within `workspace`; for one algorithm when `id` says so.
  void Ask(size_t workspace, std::optional<int> id = std::nullopt) {
    cublasLtMatmulPreference_t preference;
    Check(cublasLtMatmulPreferenceCreate(&preference), "preference");
    Check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &workspace, sizeof(workspace)),
          "preference");
    std::vector<cublasLtMatmulHeuristicResult_t> results(kAsked);
    bool can_ask = true;
    if (id) {
      const uint32_t mode = CUBLASLT_SEARCH_LIMITED_BY_ALGO_ID;
      Check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_SEARCH_MODE,
                                                 &mode, sizeof(mode)),
            "preference");
      can_ask = cublasLtMatmulAlgoInit(handle_, CUBLAS_COMPUTE_32F, CUDA_R_32F, operands_,
                                       operands_, CUDA_R_16BF, CUDA_R_16BF, *id,
                                       &results[0].algo) == CUBLAS_STATUS_SUCCESS;
    }
    int count = 0;
    if (!can_ask ||
        cublasLtMatmulAlgoGetHeuristic(handle_, product_, a_, b_, c_, c_, preference, kAsked,
                                       results.data(), &count) != CUBLAS_STATUS_SUCCESS) {
      count = 0;  // this algorithm, or this little workspace, does not do for the shape
    }
    cublasLtMatmulPreferenceDestroy(preference);
    for (int i = 0; i < count; ++i) {
      if (results[i].state == CUBLAS_STATUS_SUCCESS) Time(results[i].algo);
    }
  }

  /// Times an algorithm that was not timed before, and keeps its graph if it is the fastest.
  void Time(const cublasLtMatmulAlgo_t& algorithm) {
    const auto is_same = [&](const cublasLtMatmulAlgo_t& other) {
      return std::memcmp(other.data, algorithm.data, sizeof(algorithm.data)) == 0;
    };
    if (tried_.size() >= kMostAlgorithms || std::any_of(tried_.begin(), tried_.end(), is_same)) {
      return;
    }
    tried_.push_back(algorithm);
    const cudaGraphExec_t graph = Captured(algorithm);
    if (graph == nullptr) return found_.push_back(nullptr);
    const double microseconds =
        Median(graph, tried_.size() == 1 ? kWarmUpSeconds : 0, kSearchSamples);
    found_.push_back(microseconds);
    if (best_ != nullptr && microseconds >= best_us_) {
      cudaGraphExecDestroy(graph);
      return;
    }
    if (best_ != nullptr) cudaGraphExecDestroy(best_);
    best_ = graph;
    best_us_ = microseconds;
    best_algorithm_ = algorithm;
  }

  static std::vector<uint32_t> Capabilities(const cublasLtMatmulAlgo_t& algorithm,
                                            cublasLtMatmulAlgoCapAttributes_t attribute) {
    size_t bytes = 0;
    if (cublasLtMatmulAlgoCapGetAttribute(&algorithm, attribute, nullptr, 0, &bytes) !=
        CUBLAS_STATUS_SUCCESS) {
      return {};
    }
    std::vector<uint32_t> values(bytes / sizeof(uint32_t));
    if (cublasLtMatmulAlgoCapGetAttribute(&algorithm, attribute, values.data(),
                                          values.size() * sizeof(uint32_t),
                                          &bytes) != CUBLAS_STATUS_SUCCESS) {
      return {};
    }
    return values;
  }

  static bool Configured(cublasLtMatmulAlgo_t* algorithm,
                         cublasLtMatmulAlgoConfigAttributes_t attribute, uint32_t value) {
    return cublasLtMatmulAlgoConfigSetAttribute(algorithm, attribute, &value, sizeof(value)) ==
           CUBLAS_STATUS_SUCCESS;
  }

  /// A graph of launches over all copies; null when the algorithm refuses.
  cudaGraphExec_t Captured(const cublasLtMatmulAlgo_t& algorithm) const {
    const float one = 1, zero = 0;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    for (int64_t i = 0; i < launches() && status == CUBLAS_STATUS_SUCCESS; ++i) {
      void* y = y_.at(i % copies_ * y_bytes_);
      status = cublasLtMatmul(handle_, product_, &one, weight_.at(0), a_,
                              x_.at(i % copies_ * x_bytes_), b_, &zero, y, c_, y, c_, &algorithm,
                              workspace_.at(0), kWorkspace, stream_);
    }
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
    if (status != CUBLAS_STATUS_SUCCESS) {
      if (graph != nullptr) cudaGraphDestroy(graph);
      cudaGetLastError();  // what a refused launch may have left
      return nullptr;
    }
    Check(ended, "capture");
    cudaGraphExec_t executable = nullptr;
    Check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(graph);
    return executable;
  }

  /// Median microseconds of a launch. Replays are queued one after the other, so the device does
  /// not idle between them.
  double Median(cudaGraphExec_t graph, double warm_up_seconds, int samples) const {
    const auto replay = [&](int count) {
      std::vector<cudaEvent_t> marks(count + 1);
      for (cudaEvent_t& mark : marks) Check(cudaEventCreate(&mark), "cudaEventCreate");
      Check(cudaEventRecord(marks[0], stream_), "cudaEventRecord");
      for (int i = 0; i < count; ++i) {
        Check(cudaGraphLaunch(graph, stream_), "cudaGraphLaunch");
        Check(cudaEventRecord(marks[i + 1], stream_), "cudaEventRecord");
      }
      Check(cudaEventSynchronize(marks.back()), "replay");
      std::vector<float> milliseconds(count);
      for (int i = 0; i < count; ++i)
        Check(cudaEventElapsedTime(&milliseconds[i], marks[i], marks[i + 1]), "elapsed time");
      for (const cudaEvent_t mark : marks) cudaEventDestroy(mark);
      return milliseconds;
    };
    const float once = replay(2)[1];  // the first replay uploads the graph
    const int warm = static_cast<int>(std::ceil(1e3 * warm_up_seconds / once));
    std::vector<float> timed = replay(warm + samples);
    timed.erase(timed.begin(), timed.begin() + warm);
    std::nth_element(timed.begin(), timed.begin() + samples / 2, timed.end());
    return 1e3 * timed[samples / 2] / static_cast<double>(launches());
  }

  cublasLtHandle_t handle_;
  cudaStream_t stream_;
  Shape shape_;
  cudaDataType_t operands_;
  int64_t x_bytes_, y_bytes_;  // of a copy
  int64_t copies_;
  Buffer x_, y_, weight_, bias_, workspace_;
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
  nlohmann::json found_;
  std::vector<cublasLtMatmulAlgo_t> tried_;
  cudaGraphExec_t best_ = nullptr;
  double best_us_ = 0;
  cublasLtMatmulAlgo_t best_algorithm_ = {};
};

int Main(int argc, char** argv) {
  bool turns = false, e4m3 = false;
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--turns") == 0) {
      turns = true;
    } else if (std::strcmp(argv[i], "--precision=fp8") == 0) {
      e4m3 = true;
    } else if (Parse(argv[i])) {
      names.emplace_back(argv[i]);
    } else {
      std::fprintf(stderr,
                   "unknown argument '%s'; see the head of tests/bench/cublaslt_search.cc\n",
                   argv[i]);
      return 1;
    }
  }
  if (!turns && names.empty()) {
    std::fprintf(stderr, "name a layer, or --turns\n");
    return 1;
  }
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream), "cudaStreamCreate");
  cublasLtHandle_t handle;
  Check(cublasLtCreate(&handle), "cublasLtCreate");
  const size_t version = cublasLtGetVersion();

  if (!turns) {
    for (const std::string& name : names) {
      const Layer layer(handle, stream, *Parse(name), e4m3);
      Answer(nlohmann::json{{"name", name},
                            {"device", properties.name},
                            {"cublaslt", version},
                            {"us", layer.Microseconds()},
                            {"algorithms_us", layer.found()}});
    }
    return 0;
  }
  Answer(nlohmann::json{{"ready", {{"device", properties.name}, {"cublaslt", version}}}});
  std::string prepared;
  std::unique_ptr<Layer> layer;
  for (Request request; ReadRequest(&request);) {
    const std::optional<Shape> shape = Parse(request.name);
    if (!shape) {
      Answer(InvalidArgument("'{}' is no linear layer", request.name));
      continue;
    }
    if (!layer || prepared != request.name) {
      layer.reset();
      layer = std::make_unique<Layer>(handle, stream, *shape, e4m3);
      prepared = request.name;
    }
    if (request.verb == "prepare") {
      Answer(nlohmann::json{{"algorithms_us", layer->found()}});
    } else if (request.verb == "measure") {
      Answer(nlohmann::json{{"us", layer->Microseconds()}});
    } else {
      Answer(InvalidArgument("unknown request '{}'", request.verb));
    }
  }
  return 0;
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) { return denoised::Main(argc, argv); }
