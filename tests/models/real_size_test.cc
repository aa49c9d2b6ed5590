// SPDX-License-Identifier: Apache-2.0
// UNets of real size with random weights. The CPU backend is the reference for one row in fp32 on
// CUDA, which is the reference for bf16. Rows of batches of 64 and 256, in captured graphs whose
// kernels were chosen by measuring, have the bits of rows alone.

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "engine/backend/counting.h"
#include "engine/core/config_reader.h"
#include "engine/models/unet2d.h"
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

UNet2DConfig ReadConfig(const std::string& name) {
  const std::string file = DENOISED_SOURCE_DIR "/tests/models/configs/" + name + "/config.json";
  return UNet2DConfig::Parse(ReadJsonFile(file).value(), file).value();
}

/// A model on a backend, and what its evaluations need.
class Network {
 public:
  Network(const UNet2DConfig& config, const BackendOptions& options) {
    auto backend = OpenBackend(options);
    EXPECT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    auto model = LoadUNet2D(*backend_, config, Weights::Synthetic(1));
    EXPECT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
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
    for (int row = 0; row < std::min(count, kDistinctRows); ++row) {
      std::mt19937 random(static_cast<unsigned>((first + row) % kDistinctRows));
      std::normal_distribution<float> normal;
      Tensor image = Tensor::Host({elements}, dtype);
      for (int64_t i = 0; i < elements; ++i) {
        const float value = BFloat16ToFloat(FloatToBFloat16(normal(random)));
        if (dtype == DType::kF32) {
          image.as<float>()[i] = value;
        } else {
          image.as<uint16_t>()[i] = FloatToBFloat16(value);
        }
      }
      images.push_back(image);
    }
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
    return input;
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Denoiser> model_;
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

class CudaRealSize : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    DENOISED_NEEDS_GPU();
    config_ = ReadConfig(GetParam());
  }

  void ExpectClose(const char* what, const Tensor& out, const Tensor& reference,
                   double tolerance) const {
    const double error = RelativeError(out.span<float>(), reference.span<float>());
    EXPECT_LE(error, tolerance) << what;
    std::printf("%s, %s: relative error %.2g\n", GetParam().c_str(), what, error);
  }

  UNet2DConfig config_;
};

TEST_P(CudaRealSize, Fp32IsTheCpus) {
  const Tensor reference = Network(config_, kCpu).Run(1, 1);
  EXPECT_NEAR(RootMeanSquare(reference), 1, 0.7) << "weights that let errors fade or grow";
  ExpectClose("fp32", Network(config_, kFp32).Run(1, 1), reference, kFp32Tolerance);
}

TEST_P(CudaRealSize, Bf16IsNearFp32) {
  const Tensor reference = Network(config_, kFp32).Run(0, 4);
  for (const Kernels& kernels : kKernels) {
    ExpectClose(kernels.name, Network(config_, kernels.options).Run(0, 4), reference,
                kBf16Tolerance);
  }
  UNet2DConfig wrong = config_;
  wrong.norm_num_groups /= 2;
  const Tensor other = Network(wrong, kKernels[0].options).Run(0, 4);
  EXPECT_GT(RelativeError(other.span<float>(), reference.span<float>()), 2 * kBf16Tolerance)
      << "the test can fail";
}

TEST_P(CudaRealSize, RowsOfLargeBatchesHaveTheBitsOfRowsAlone) {
  for (const Kernels& kernels : kKernels) {
    Network network(config_, kernels.options);
    std::vector<Tensor> alone;
    for (int row = 0; row < kDistinctRows; ++row) alone.push_back(network.Run(row, 1));
    EXPECT_NE(std::memcmp(alone[0].data(), alone[1].data(), alone[0].bytes()), 0);
    for (const int rows : {64, 256}) {
      const Tensor together = network.Run(0, rows, /*captured=*/true);
      for (int row = 0; row < rows; ++row) {
        const Tensor& expected = alone[row % kDistinctRows];
        ASSERT_EQ(std::memcmp(together.Slice(row, 1).data(), expected.data(), expected.bytes()), 0)
            << GetParam() << ", " << kernels.name << ": row " << row << " of " << rows;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, CudaRealSize,
                         testing::Values("cifar10-32", "adm-64", "celebahq-256"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace denoised
