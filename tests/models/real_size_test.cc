// SPDX-License-Identifier: Apache-2.0
// UNets of real size with random weights. The CPU backend is the reference for one row in fp32 on
// CUDA, which is the reference for bf16. Rows of large batches, in captured graphs whose kernels
// were chosen by measuring, have the bits of rows alone.

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "engine/backend/counting.h"
#include "engine/core/config_reader.h"
#include "engine/models/registry.h"
#include "tests/models/golden.h"
#include "tests/needs_gpu.h"

namespace denoised {
namespace {

/// ‖out − reference‖ / ‖reference‖, about three times what an H200 measured: in fp32 1.1e-6
/// to 1.7e-6, in bf16 4.9e-3 (cifar10-32), 6.1e-3 (celebahq-256) and 9.2e-3 (adm-64).
constexpr double kFp32Tolerance = 5e-6, kBf16Tolerance = 3e-2;

/// Rows that differ in image, time and class; row i of a batch is number i % kDistinctRows. A
/// prime, so that a row that is taken for one a tile or a power of two away has other bits.
constexpr int kDistinctRows = 61;

struct Model {
  const char* name;  // of a folder of tests/models/configs
  std::vector<int> batches;
  bool fits_cpu = true;
};
void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }

constexpr int kPromptTokens = 77;

/// A model on a backend, and what its evaluations need.
class Network {
 public:
  /// `wrong`: with half the groups in its norms.
  Network(const Model& model, const BackendOptions& options, bool wrong = false) {
    auto backend = OpenBackend(options);
    EXPECT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    const std::string file =
        fmt::format("{}/tests/models/configs/{}/config.json", DENOISED_SOURCE_DIR, model.name);
    const nlohmann::json json = ReadJsonFile(file).value();
    auto loaded = Load(json, file, wrong);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    model_ = *std::move(loaded);
  }

  /// F32 [count, H, W, C] of rows first, first + 1, …; `captured`: by a graph.
  Tensor Run(int first, int count, bool captured = false) {
    const DenoiserInput input = Rows(first, count);
    CountingBackend counting(*backend_);
    Arena measuring = Arena::Measuring(backend_->device());
    nn::Context measured{counting, measuring};
    static_cast<void>(model_->Forward(measured, input));
    Arena arena(Allocate({static_cast<int64_t>(measuring.peak())}, DType::kU8));

    nn::Context context{*backend_, arena};
    Tensor out;
    const auto forward = [&] {  // twice where kernels are measured, in the same memory
      out = Tensor();
      out = model_->Forward(context, input);
    };
    std::unique_ptr<Graph> graph;
    if (captured) {
      auto recorded = backend_->Capture(forward);
      EXPECT_TRUE(recorded.ok()) << recorded.status();
      graph = *std::move(recorded);
      backend_->Launch(*graph);
    } else {
      forward();
    }
    auto host = backend_->BeginDownload(out)->Wait();
    EXPECT_TRUE(host.ok()) << host.status();
    return *std::move(host);
  }

 private:
  absl::StatusOr<std::unique_ptr<Denoiser>> Load(nlohmann::json json, const std::string& file,
                                                 bool wrong) {
    const auto number = [&](const char* field, int absent) {
      return json.contains(field) && json[field].is_number() ? json[field].get<int>() : absent;
    };
    const TextStates text = {.features = number("cross_attention_dim", 0),
                             .pooled_features = number("projection_class_embeddings_input_dim", 0) -
                                                6 * number("addition_time_embed_dim", 0)};
    if (wrong) json["norm_num_groups"] = number("norm_num_groups", 32) / 2;
    ModelDirectory directory;
    const auto& part = directory.components["unet"] = {
        .class_name = json.value("_class_name", ""), .config_file = file, .config = json};
    return FindDenoiser(directory).value()->load(*backend_, part, text, Weights::Synthetic(1));
  }
  Tensor Allocate(const Shape& shape, DType dtype) {
    auto tensor = backend_->Allocate(shape, dtype, "a test");
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    return *std::move(tensor);
  }
  Tensor Upload(const Tensor& host) {
    Tensor tensor = Allocate(host.shape(), host.dtype());
    backend_->Upload(host.data(), host.bytes(), tensor);
    return tensor;
  }

  DenoiserInput Rows(int first, int count) {
    const DenoiserTraits& traits = model_->traits();
    const DType dtype = backend_->activation_dtype();
    const int64_t elements = int64_t{traits.height} * traits.width * traits.channels;
    const size_t row_bytes = elements * SizeOf(dtype);
    std::vector<Tensor> images;
    for (int row = 0; row < std::min(count, kDistinctRows); ++row)
      images.push_back(Normal((first + row) % kDistinctRows, elements, dtype));
    const Tensor x = Tensor::Host({count, traits.height, traits.width, traits.channels}, dtype);
    const Tensor times = Tensor::Host({count}, DType::kF32);
    const Tensor labels = Tensor::Host({count}, DType::kI32);
    const int classes = std::max(1, traits.class_embeddings);
    for (int row = 0; row < count; ++row) {
      const int number = (first + row) % kDistinctRows;
      std::memcpy(static_cast<std::byte*>(x.data()) + row * row_bytes,
                  images[row % kDistinctRows].data(), row_bytes);
      times.as<float>()[row] = static_cast<float>(999 - 16 * number);
      labels.as<int32_t>()[row] = 37 * number % classes;
    }
    DenoiserInput input{.x = Upload(x), .condition = Upload(times)};
    if (traits.condition == ClassCondition::kLabel) input.label = Upload(labels);
    if (traits.text_features > 0) {
      if (!sets_.keys_values) MakeSets();
      for (int row = 0; row < count; ++row)
        labels.as<int32_t>()[row] = (first + row) % kDistinctRows;
      input.label = Upload(labels);
      input.sets = sets_;
    }
    return input;
  }

  /// As many condition sets as there are distinct rows, with keys and values as a prompt gives
  /// them.
  void MakeSets() {
    const DenoiserTraits& traits = model_->traits();
    const DType dtype = backend_->activation_dtype();
    const auto normal = [&](int seed, const Shape& shape) {
      Tensor all = Allocate(shape, dtype);
      for (int set = 0; set < kDistinctRows; ++set) {
        const int64_t elements = all.elements() / kDistinctRows;
        const Tensor one = Normal(seed + set, elements, dtype);
        backend_->Upload(one.data(), one.bytes(), all.Slice(set, 1));
      }
      return all;
    };
    sets_.keys_values = normal(1000, {kDistinctRows, kPromptTokens, traits.key_value_columns});
    if (traits.vector_features > 0)
      sets_.vectors = normal(2000, {kDistinctRows, traits.vector_features});
    const Tensor counts = Tensor::Host({kDistinctRows}, DType::kI32);
    for (int32_t& tokens : counts.span<int32_t>()) tokens = kPromptTokens;
    sets_.key_counts = Upload(counts);
  }

  /// Standard normal numbers that bf16 can represent.
  static Tensor Normal(int seed, int64_t elements, DType dtype) {
    std::mt19937 random(static_cast<unsigned>(seed));
    std::normal_distribution<float> normal;
    Tensor numbers = Tensor::Host({elements}, dtype);
    for (int64_t i = 0; i < elements; ++i) {
      const uint16_t value = FloatToBFloat16(normal(random));
      if (dtype == DType::kF32) {
        numbers.as<float>()[i] = BFloat16ToFloat(value);
      } else {
        numbers.as<uint16_t>()[i] = value;
      }
    }
    return numbers;
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Denoiser> model_;
  ConditionSets sets_;  // for models that read text
};

const BackendOptions kCpu = {.device = "cpu"}, kFp32 = {.device = "cuda", .fp32 = true};
struct Kernels {
  const char* name;
  BackendOptions options;
};
const Kernels kKernels[] = {
    {"bf16", {.device = "cuda", .autotune = true}},
    {"bf16, generic", {.device = "cuda", .generic_kernels = true, .autotune = true}}};

double RootMeanSquare(const Tensor& tensor) {
  double sum = 0;
  for (const float value : tensor.span<float>()) sum += double{value} * value;
  return std::sqrt(sum / static_cast<double>(tensor.elements()));
}

class CudaRealSize : public testing::TestWithParam<Model> {
 protected:
  void SetUp() override { DENOISED_NEEDS_GPU(); }

  void ExpectClose(const char* what, const Tensor& out, const Tensor& reference,
                   double tolerance) const {
    const double error = RelativeError(out.span<float>(), reference.span<float>());
    EXPECT_LE(error, tolerance) << what;
    std::printf("%s, %s: relative error %.2g\n", GetParam().name, what, error);
  }
};

TEST_P(CudaRealSize, Fp32IsTheCpus) {
  if (!GetParam().fits_cpu) GTEST_SKIP() << "its weights are too many for a CPU in a test";
  const Tensor reference = Network(GetParam(), kCpu).Run(1, 1);
  EXPECT_NEAR(RootMeanSquare(reference), 1, 0.7) << "weights that let errors fade or grow";
  ExpectClose("fp32", Network(GetParam(), kFp32).Run(1, 1), reference, kFp32Tolerance);
}

TEST_P(CudaRealSize, Bf16IsNearFp32) {
  const Tensor reference = Network(GetParam(), kFp32).Run(0, 4);
  for (const Kernels& kernels : kKernels) {
    ExpectClose(kernels.name, Network(GetParam(), kernels.options).Run(0, 4), reference,
                kBf16Tolerance);
  }
  const Tensor other = Network(GetParam(), kKernels[0].options, /*wrong=*/true).Run(0, 4);
  EXPECT_GT(RelativeError(other.span<float>(), reference.span<float>()), 2 * kBf16Tolerance)
      << "the test can fail";
}

TEST_P(CudaRealSize, RowsOfLargeBatchesHaveTheBitsOfRowsAlone) {
  for (const Kernels& kernels : kKernels) {
    Network network(GetParam(), kernels.options);
    std::vector<Tensor> alone;
    for (int row = 0; row < kDistinctRows; ++row) alone.push_back(network.Run(row, 1));
    EXPECT_NE(std::memcmp(alone[0].data(), alone[1].data(), alone[0].bytes()), 0);
    for (const int rows : GetParam().batches) {
      const Tensor together = network.Run(0, rows, /*captured=*/true);
      for (int row = 0; row < rows; ++row) {
        const Tensor& expected = alone[row % kDistinctRows];
        ASSERT_EQ(std::memcmp(together.Slice(row, 1).data(), expected.data(), expected.bytes()), 0)
            << GetParam().name << ", " << kernels.name << ": row " << row << " of " << rows;
      }
    }
  }
}

const Model kModels[] = {
    {"cifar10-32", {64, 256}}, {"adm-64", {64, 256}}, {"celebahq-256", {64, 256}},
    {"sd15-unet", {16, 64}},   {"sd21-unet", {16}},   {"sdxl-unet", {2, 16}, /*fits_cpu=*/false},
};

INSTANTIATE_TEST_SUITE_P(Models, CudaRealSize, testing::ValuesIn(kModels), [](const auto& info) {
  std::string name = info.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace denoised
