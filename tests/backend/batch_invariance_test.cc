// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "tests/backend/backend_fixture.h"

/// A row has the same bits alone and at any place of any batch, whatever its neighbours hold. For
/// each op: run one row alone, then in every slot of batches of 2 … kMaxRows with random
/// neighbours, and compare with memcmp.

namespace denoised {
namespace {

using reference::Array;

constexpr int64_t kMaxRows = 6;

class BatchInvarianceTest : public OnBackend {
 protected:
  /// What varies from row to row: the shape of one row's part and how it is made.
  struct Input {
    Shape row;
    DType dtype;
    double scale = 1;
  };
  /// Runs the op on inputs that were stacked to [rows, ...] and uploaded; returns its output.
  using Op = std::function<Tensor(const std::vector<Tensor>& inputs, int64_t rows)>;

  void ExpectInvariant(const char* what, const std::vector<Input>& inputs, const Op& op) {
    std::vector<Array> subject;
    for (const Input& input : inputs) subject.push_back(RandomRow(input));
    const std::vector<uint8_t> alone = Bytes(Run(inputs, {subject}, op), 0);
    for (int64_t rows = 2; rows <= kMaxRows; ++rows) {
      for (int64_t slot = 0; slot < rows; ++slot) {
        std::vector<std::vector<Array>> batch(rows);
        for (int64_t r = 0; r < rows; ++r) {
          for (size_t i = 0; i < inputs.size(); ++i) {
            batch[r].push_back(r == slot ? subject[i] : RandomRow(inputs[i]));
          }
        }
        const Tensor out = Run(inputs, batch, op);
        ASSERT_EQ(Bytes(out, slot) == alone, true)
            << what << ": row " << slot << " of " << rows << " differs from the same row alone";
        const int64_t neighbour = slot == 0 ? 1 : 0;
        ASSERT_NE(Bytes(out, neighbour) == alone, true)
            << what << ": a row of other values has the same result; the test proves nothing";
      }
    }
  }

  static Shape WithRows(int64_t rows, const Shape& row) {
    int64_t dims[Shape::kMaxRank] = {rows};
    for (int i = 0; i < row.rank(); ++i) dims[i + 1] = row[i];
    return Shape(std::span<const int64_t>(dims, row.rank() + 1));
  }

 private:
  Array RandomRow(const Input& input) { return Random(input.row, input.dtype, input.scale); }

  Tensor Run(const std::vector<Input>& inputs, const std::vector<std::vector<Array>>& batch,
             const Op& op) {
    const int64_t rows = static_cast<int64_t>(batch.size());
    std::vector<Tensor> uploaded;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Array stacked(WithRows(rows, inputs[i].row));
      stacked.values.clear();
      for (const std::vector<Array>& row : batch) {
        stacked.values.insert(stacked.values.end(), row[i].values.begin(), row[i].values.end());
      }
      uploaded.push_back(Upload(stacked, inputs[i].dtype));
    }
    return op(uploaded, rows);
  }

  std::vector<uint8_t> Bytes(const Tensor& out, int64_t row) {
    const Tensor host = Download(out.Slice(row, 1));
    const uint8_t* bytes = static_cast<const uint8_t*>(host.data());
    return {bytes, bytes + host.bytes()};
  }
};

TEST_P(BatchInvarianceTest, Conv2d) {
  struct {
    int64_t height, width, c1, c2, out, kernel;
    int stride;
    bool upsample;
    int64_t shortcut = 0, shortcut2 = 0;
  } shapes[] = {
      {32, 32, 1, 0, 64, 3, 1, false},
      {32, 32, 64, 0, 1, 3, 1, false},
      {16, 16, 64, 0, 64, 3, 1, false},
      {16, 16, 64, 64, 64, 3, 1, false},
      {16, 16, 128, 0, 64, 1, 1, false},
      {16, 16, 64, 0, 64, 3, 2, false},
      {8, 8, 128, 0, 128, 3, 1, true},
      {8, 8, 256, 0, 256, 3, 1, false},
      {4, 4, 256, 0, 256, 3, 1, false},
      {2, 2, 512, 512, 256, 3, 1, false},
      {7, 5, 13, 6, 11, 3, 1, false},
      {9, 9, 3, 0, 5, 3, 2, false},
      {1, 1, 40, 0, 24, 1, 1, false},
      {16, 16, 64, 0, 128, 3, 1, false, 64, 32},
      {8, 8, 192, 0, 192, 3, 1, false, 192, 128},
      {4, 4, 256, 0, 256, 3, 1, false, 256, 256},
      {7, 5, 16, 0, 24, 3, 1, false, 40, 0},
  };
  for (const auto& s : shapes) {
    const Array weight = Random({s.out, s.c1 + s.c2, s.kernel, s.kernel}, activation(), 0.05);
    const auto packed = PackConv2d(weight, Random({s.out}, DType::kF32), s.upsample);
    const auto shortcut =
        s.shortcut > 0
            ? PackConv2d(Random({s.out, s.shortcut + s.shortcut2, 1, 1}, activation(), 0.05),
                         Array())
            : nullptr;
    const int pad = static_cast<int>(s.kernel / 2), up = s.upsample ? 2 : 1;
    const int64_t out_height = (s.height * up + 2 * pad - s.kernel) / s.stride + 1;
    const int64_t out_width = (s.width * up + 2 * pad - s.kernel) / s.stride + 1;
    std::vector<Input> inputs = {
        {{s.height, s.width, s.c1}, activation()},
        {{s.out}, activation()},
        {{out_height, out_width, shortcut ? s.shortcut : s.out}, activation()}};
    if (s.c2 > 0) inputs.push_back({{s.height, s.width, s.c2}, activation()});
    if (s.shortcut2 > 0) inputs.push_back({{out_height, out_width, s.shortcut2}, activation()});
    const std::string what =
        fmt::format("convolution {}x{}x{}+{} to {}", s.height, s.width, s.c1, s.c2, s.out);
    const auto conv = [&](bool with_add, const std::vector<Tensor>& in, int64_t rows) {
      Conv2dArgs args{.x = in[0],
                      .weight = packed.get(),
                      .stride = s.stride,
                      .pad_top = pad,
                      .pad_left = pad,
                      .pad_bottom = pad,
                      .pad_right = pad,
                      .prologue = {.upsample2x = s.upsample},
                      .epilogue = {.scale = 0.7071f, .activation = Activation::kSilu}};
      if (with_add) args.epilogue.add = in[1];
      if (s.c2 > 0) args.prologue.x2 = in[3];
      if (shortcut) {
        args.epilogue.shortcut = {.x = in[2], .weight = shortcut.get()};
        if (s.shortcut2 > 0) args.epilogue.shortcut.x2 = in.back();
      } else {
        args.epilogue.residual = in[2];
      }
      args.out = Output({rows, out_height, out_width, s.out});
      backend().Conv2d(args);
      return args.out;
    };
    for (bool with_add : {true, false}) {  // kernels that store vectors take one of the two
      ExpectInvariant(what.c_str(), inputs, [&](const std::vector<Tensor>& in, int64_t rows) {
        return conv(with_add, in, rows);
      });
    }
  }
}

TEST_P(BatchInvarianceTest, Linear) {
  for (const Shape& row : {Shape{512}, Shape{67}, Shape{64, 128}, Shape{49, 33}, Shape{1, 64}}) {
    const int64_t in_features = row[-1];
    for (int64_t out_features : {384, 37}) {
      const auto packed = PackLinear(Random({out_features, in_features}, activation(), 0.05),
                                     Random({out_features}, DType::kF32));
      int64_t dims[2] = {row[0], out_features};
      const Shape out_row = row.rank() == 2 ? Shape(dims) : Shape{out_features};
      for (const DType dtype : {activation(), DType::kF32}) {
        const std::string what =
            fmt::format("linear {} {} to {}", Name(dtype), row.ToString(), out_features);
        ExpectInvariant(what.c_str(), {{row, dtype}, {out_row, activation()}},
                        [&](const std::vector<Tensor>& in, int64_t rows) {
                          LinearArgs args{
                              .x = in[0], .weight = packed.get(), .epilogue = {.residual = in[1]}};
                          args.out = Output(WithRows(rows, out_row));
                          backend().Linear(args);
                          return args.out;
                        });
      }
    }
  }
}

// As many tiles of each kind as there are; channels and outputs that nothing divides; norms that
// round their result, and those that do not.
TEST_P(BatchInvarianceTest, LayersInE4m3) {
  if (!backend().MultipliesE4m3()) GTEST_SKIP() << "no kernels in e4m3 for this device";
  const E4m3Layer e4m3 = {.input_scale = 0x1p-6f};
  struct {
    int64_t height, width, c1, c2, out, kernel;
    int stride;
    int groups = 0;  // of a norm; 0: none
    bool upsample2x = false;
    int64_t shortcut = 0;
  } shapes[] = {{16, 16, 64, 0, 128, 3, 1},
                {16, 16, 64, 64, 192, 3, 1, 32},
                {7, 5, 13, 6, 11, 3, 1},
                {16, 16, 128, 0, 64, 1, 1, 32},
                {15, 17, 64, 0, 72, 3, 2},
                {8, 8, 256, 0, 256, 3, 1, 32},
                {9, 7, 24, 0, 160, 3, 1, 8},
                {64, 64, 32, 0, 32, 3, 1, 32},
                {16, 16, 64, 0, 128, 3, 1, 0, true},
                {16, 16, 128, 0, 128, 3, 1, 32, false, 192},
                {9, 7, 64, 0, 72, 3, 1, 0, false, 24}};
  for (const auto& s : shapes) {
    const int64_t channels = s.c1 + s.c2;
    const int pad = static_cast<int>(s.kernel / 2);
    const auto packed =
        backend()
            .PackConv2d(ToHost(Random({s.out, channels, s.kernel, s.kernel}, DType::kF32, 0.05),
                               DType::kF32),
                        ToHost(Random({s.out}, DType::kF32), DType::kF32), s.upsample2x, e4m3)
            .value();
    const auto shortcut =
        s.shortcut == 0
            ? nullptr
            : backend()
                  .PackConv2d(
                      ToHost(Random({s.out, s.shortcut, 1, 1}, DType::kF32, 0.05), DType::kF32),
                      Tensor(), false, {})
                  .value();
    const Tensor gamma = Upload(Random({channels}, DType::kF32), DType::kF32);
    const Tensor beta = Upload(Random({channels}, DType::kF32), DType::kF32);
    const int64_t up = s.upsample2x ? 2 : 1, out_height = (up * s.height - 1) / s.stride + 1,
                  out_width = (up * s.width - 1) / s.stride + 1;
    std::vector<Input> inputs = {
        {{s.height, s.width, s.c1}, activation()},
        {{out_height, out_width, shortcut ? s.shortcut : s.out}, activation()}};
    if (s.c2 > 0) inputs.push_back({{s.height, s.width, s.c2}, activation()});
    ExpectInvariant(
        "convolution in e4m3", inputs, [&](const std::vector<Tensor>& in, int64_t rows) {
          Conv2dArgs args{.x = in[0],
                          .weight = packed.get(),
                          .stride = s.stride,
                          .pad_top = pad,
                          .pad_left = pad,
                          .pad_bottom = pad,
                          .pad_right = pad};
          if (shortcut) {
            args.epilogue.shortcut = {.x = in[1], .weight = shortcut.get()};
          } else {
            args.epilogue.residual = in[1];
          }
          args.prologue.upsample2x = s.upsample2x;
          if (s.c2 > 0) args.prologue.x2 = in[2];
          if (s.groups > 0) {
            args.prologue.norm = {
                .gamma = gamma, .beta = beta, .groups = s.groups, .activation = Activation::kSilu};
            args.prologue.normed = Output({rows, s.height, s.width, channels});
          }
          args.prologue.rounded = Scratch(args.x, *packed);
          args.out = Output({rows, out_height, out_width, s.out});
          backend().Conv2d(args);
          return args.out;
        });
  }
  struct {
    int64_t tokens, in, out;
    bool gated;
  } linears[] = {{64, 128, 384, false}, {49, 33, 37, false}, {256, 320, 2560, true}};
  for (const auto& s : linears) {
    const auto packed =
        backend()
            .PackLinear({ToHost(Random({s.out, s.in}, DType::kF32, 0.05), DType::kF32)},
                        {ToHost(Random({s.out}, DType::kF32), DType::kF32)}, e4m3, s.gated)
            .value();
    ExpectInvariant("linear in e4m3", {{{s.tokens, s.in}, activation()}},
                    [&](const std::vector<Tensor>& in, int64_t rows) {
                      LinearArgs args{.x = in[0], .weight = packed.get()};
                      if (s.gated) args.epilogue.ungated = Output({rows, s.tokens, s.out});
                      args.prologue.rounded = Scratch(args.x, *packed);
                      args.out = Output({rows, s.tokens, s.gated ? s.out / 2 : s.out});
                      backend().Linear(args);
                      return args.out;
                    });
  }
}

TEST_P(BatchInvarianceTest, GroupNorm) {
  struct {
    Shape row;
    int64_t c2;
    int groups;
  } shapes[] = {{{32, 32, 64}, 0, 32}, {{16, 16, 64}, 64, 32}, {{8, 8, 128}, 0, 32},
                {{7, 9, 30}, 15, 9},   {{64, 128}, 0, 32},     {{2, 2, 512}, 0, 32}};
  for (const auto& s : shapes) {
    const int64_t channels = s.row[-1] + s.c2;
    const Tensor gamma = Upload(Random({channels}, DType::kF32), DType::kF32);
    const Tensor beta = Upload(Random({channels}, DType::kF32), DType::kF32);
    int64_t dims[Shape::kMaxRank];
    for (int i = 0; i < s.row.rank(); ++i) dims[i] = s.row[i];
    const auto with_channels = [&](int64_t c) {
      dims[s.row.rank() - 1] = c;
      return Shape(std::span<const int64_t>(dims, s.row.rank()));
    };
    const Shape out_row = with_channels(channels);
    std::vector<Input> inputs = {{s.row, activation(), 3}, {{2 * channels}, activation()}};
    if (s.c2 > 0) inputs.push_back({with_channels(s.c2), activation()});
    ExpectInvariant(("group norm " + s.row.ToString()).c_str(), inputs,
                    [&](const std::vector<Tensor>& in, int64_t rows) {
                      GroupNormArgs args{.x = in[0],
                                         .norm = {.gamma = gamma,
                                                  .beta = beta,
                                                  .groups = s.groups,
                                                  .scale_shift = in[1],
                                                  .activation = Activation::kSilu}};
                      if (s.c2 > 0) args.x2 = in[2];
                      args.out = Output(WithRows(rows, out_row));
                      backend().GroupNorm(args);
                      return args.out;
                    });
  }
}

TEST_P(BatchInvarianceTest, Attention) {
  struct {
    int64_t tokens, width;
    int heads;
  } shapes[] = {{64, 128, 1}, {256, 64, 1}, {64, 128, 2}, {256, 128, 16},
                {49, 40, 1},  {1, 64, 2},   {16, 512, 1}, {200, 320, 5}};
  for (const auto& s : shapes) {
    const std::string what = fmt::format("attention {} x {}, {} heads", s.tokens, s.width, s.heads);
    ExpectInvariant(what.c_str(), {{{s.tokens, 3 * s.width}, activation()}},
                    [&](const std::vector<Tensor>& in, int64_t rows) {
                      AttentionArgs args{.q = in[0].Columns(0, s.width),
                                         .k = in[0].Columns(s.width, s.width),
                                         .v = in[0].Columns(2 * s.width, s.width),
                                         .heads = s.heads,
                                         .scale = 0.125f};
                      args.out = Output({rows, s.tokens, s.width});
                      backend().Attention(args);
                      return args.out;
                    });
  }
}

TEST_P(BatchInvarianceTest, AttentionToSetsOfKeys) {
  constexpr int64_t kSets = 4;
  struct {
    int64_t queries, keys, width;
    int heads;
    bool causal;
  } shapes[] = {{64, 77, 320, 8, false},
                {77, 77, 128, 2, true},
                {49, 154, 40, 1, false},
                {16, 77, 1280, 8, false},
                {33, 33, 13, 1, true}};
  for (const auto& s : shapes) {
    const Tensor keys = Upload(Random({kSets, s.keys, 2 * s.width}));
    std::vector<int32_t> counts;
    for (int64_t set = 0; set < kSets; ++set) {
      counts.push_back(static_cast<int32_t>(RandomInt(1, s.keys)));
    }
    const Tensor key_counts = UploadInts(counts, {kSets});
    const std::string what = fmt::format("attention {} to {} x {}", s.queries, s.keys, s.width);
    ExpectInvariant(what.c_str(), {{{s.queries, s.width}, activation()}, {Shape(), DType::kF32}},
                    [&](const std::vector<Tensor>& in, int64_t rows) {
                      std::vector<int32_t> sets;  // from each row's number
                      for (const float number : Download(in[1]).ToFloats()) {
                        sets.push_back(static_cast<int32_t>(std::fabs(number) * 100) % kSets);
                      }
                      AttentionArgs args{.q = in[0],
                                         .k = keys.Columns(0, s.width),
                                         .v = keys.Columns(s.width, s.width),
                                         .key_set = UploadInts(sets, {rows}),
                                         .key_counts = key_counts,
                                         .causal = s.causal,
                                         .heads = s.heads,
                                         .scale = 0.125f,
                                         .out = Output({rows, s.queries, s.width})};
                      backend().Attention(args);
                      return args.out;
                    });
  }
}

TEST_P(BatchInvarianceTest, LayerNormGatesAndCodes) {
  for (const Shape& row : {Shape{64, 320}, Shape{77, 768}, Shape{5, 37}, Shape{1280}}) {
    const Tensor gamma = Upload(Random({row[-1]}, DType::kF32), DType::kF32);
    const Tensor beta = Upload(Random({row[-1]}, DType::kF32), DType::kF32);
    ExpectInvariant("layer norm", {{row, activation(), 3}},
                    [&](const std::vector<Tensor>& in, int64_t rows) {
                      const Tensor out = Output(WithRows(rows, row));
                      backend().LayerNorm({.x = in[0], .gamma = gamma, .beta = beta, .out = out});
                      return out;
                    });
  }
  // Tiles with the gate in their epilogue have the bits of those that leave it to another kernel.
  struct {
    int64_t tokens, in, features;
  } layers[] = {{9, 40, 13}, {256, 320, 1280}, {70, 640, 2560}, {1, 64, 128}};
  for (const auto& layer : layers) {
    const int64_t tokens = layer.tokens, in = layer.in, features = layer.features;
    const Array weight =
        Random({2 * features, in}, activation(), 1 / std::sqrt(static_cast<double>(in)));
    const Array bias = Random({2 * features}, DType::kF32);
    const auto packed = PackGatedLinear(weight, bias);
    ExpectInvariant("gated linear", {{{tokens, in}, activation()}},
                    [&](const std::vector<Tensor>& inputs, int64_t rows) {
                      const Tensor out = Output({rows, tokens, features});
                      const Tensor ungated = Output({rows, tokens, 2 * features});
                      backend().Linear({.x = inputs[0],
                                        .weight = packed.get(),
                                        .epilogue = {.ungated = ungated},
                                        .out = out});
                      return out;
                    });
  }
  const Tensor codebook = Upload(Random({500, 3}, DType::kF32), DType::kF32);
  ExpectInvariant("nearest code", {{{6, 5, 3}, DType::kF32}},
                  [&](const std::vector<Tensor>& in, int64_t rows) {
                    const Tensor out = Output({rows, 6, 5, 3});
                    backend().NearestCode(in[0], codebook, out);
                    return out;
                  });
  const Tensor scale = Upload(Random({4}, DType::kF32), DType::kF32);
  ExpectInvariant(
      "gaussian", {{{6, 5, 8}, DType::kF32}, {{6, 5, 4}, DType::kF32}},
      [&](const std::vector<Tensor>& in, int64_t rows) {
        const Tensor out = Output({rows, 6, 5, 4}, DType::kF32);
        backend().Gaussian(
            {.moments = in[0], .noise = in[1], .scale = scale, .shift = scale, .out = out});
        return out;
      });
}

TEST_P(BatchInvarianceTest, EmbeddingsAndElementwise) {
  const Shape kScalar;  // one number for each row
  ExpectInvariant("timestep embedding", {{kScalar, DType::kF32, 300}},
                  [&](const std::vector<Tensor>& in, int64_t rows) {
                    TimestepEmbeddingArgs args{.t = in[0], .out = Output({rows, 129})};
                    backend().TimestepEmbedding(args);
                    return args.out;
                  });
  const Tensor weight = Upload(Random({33}, DType::kF32, 16), DType::kF32);
  ExpectInvariant("fourier embedding", {{kScalar, DType::kF32}},
                  [&](const std::vector<Tensor>& in, int64_t rows) {
                    FourierEmbeddingArgs args{
                        .t = in[0], .weight = weight, .log = false, .out = Output({rows, 66})};
                    backend().FourierEmbedding(args);
                    return args.out;
                  });
  for (const Shape& row : {Shape{8, 8, 64}, Shape{6, 4, 5}}) {
    ExpectInvariant("nearest upsampling", {{row, activation()}},
                    [&](const std::vector<Tensor>& in, int64_t rows) {
                      const Tensor out = Output({rows, 2 * row[0], 2 * row[1], row[2]});
                      backend().Resample2x(Resample::kNearestUp, in[0], out);
                      return out;
                    });
    ExpectInvariant("average pooling", {{row, activation()}},
                    [&](const std::vector<Tensor>& in, int64_t rows) {
                      const Tensor out = Output({rows, row[0] / 2, row[1] / 2, row[2]});
                      backend().Resample2x(Resample::kAveragePoolDown, in[0], out);
                      return out;
                    });
    ExpectInvariant("division of rows", {{row, activation()}, {kScalar, DType::kF32}},
                    [&](const std::vector<Tensor>& in, int64_t rows) {
                      const Tensor out = Output(WithRows(rows, row));
                      backend().DivideRows(in[0], in[1], out);
                      return out;
                    });
    for (Activation activation_kind : {Activation::kSilu, Activation::kMish, Activation::kGelu,
                                       Activation::kQuickGelu, Activation::kTanh}) {
      ExpectInvariant("add", {{row, activation()}, {row, DType::kF32}},
                      [&](const std::vector<Tensor>& in, int64_t rows) {
                        const Tensor out = Output(WithRows(rows, row));
                        backend().Add(in[0], 1.3f, in[1], 0.1f, activation_kind, out);
                        return out;
                      });
    }
  }
}

DENOISED_ON_EACH_BACKEND(BatchInvarianceTest);

}  // namespace
}  // namespace denoised
