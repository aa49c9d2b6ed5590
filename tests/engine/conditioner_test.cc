// SPDX-License-Identifier: Apache-2.0
// Condition sets of prompts, made by the text encoders of tests/models/latent.
#include "engine/batching/conditioner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "engine/backend/counting.h"
#include "engine/batching/step_batcher.h"
#include "engine/pipelines/pipeline.h"
#include "engine/pipelines/prompt_reader.h"
#include "tests/needs_gpu.h"

namespace denoised {
namespace {

using ::testing::ElementsAre;

/// Of `family` on a device, with sets of `max_chunks` chunks.
class Prompted {
 public:
  Prompted(const std::string& family, const std::string& device, int max_chunks, int sets = 8)
      : Prompted(family, OpenBackend({.device = device}).value(), max_chunks, sets) {}
  Prompted(const std::string& family, std::unique_ptr<Backend> backend, int max_chunks,
           int sets = 8)
      : backend_(std::move(backend)) {
    auto files =
        PipelineFiles::Read(std::string(DENOISED_SOURCE_DIR "/tests/models/latent/") + family);
    DENOISED_CHECK(files.ok(), "{}", files.status().ToString());
    auto loaded = LoadPipeline(*backend_, *files);
    DENOISED_CHECK(loaded.ok(), "{}", loaded.status().ToString());
    pipeline = std::make_unique<Pipeline>(*std::move(loaded));
    scheduler = std::make_unique<SchedulerConfig>(files->scheduler);
    auto reader = PromptReader::Load(files->directory,
                                     {.zeros_without_negative = pipeline->zeros_without_negative,
                                      .skip_layers = pipeline->skip_layers,
                                      .layers = std::numeric_limits<int>::max(),
                                      .size_numbers = pipeline->denoiser->traits().size_numbers,
                                      .guidance = pipeline->denoiser->traits().guidance_embedding,
                                      .max_chunks = max_chunks});
    DENOISED_CHECK(reader.ok(), "{}", reader.status().ToString());
    reader_ = std::make_unique<PromptReader>(*std::move(reader));
    auto made = Conditioner::Create(*backend_, pipeline->denoiser,
                                    {.models = pipeline->text_encoders,
                                     .final_norm = pipeline->final_norm,
                                     .skip_layers = pipeline->skip_layers,
                                     .zeros_without_negative = pipeline->zeros_without_negative,
                                     .max_chunks = max_chunks},
                                    sets);
    DENOISED_CHECK(made.ok(), "{}", made.status().ToString());
    conditioner = *std::move(made);
  }

  TokenizedPrompt Tokens(const std::string& text, PromptRead* read = nullptr,
                         const std::string& text_2 = "") {
    PromptRead ignored;
    std::vector<FieldViolation> violations;
    TextPrompt prompt{.text = text};
    if (!text_2.empty()) prompt.text_2 = text_2;
    const auto tokens = reader_->Condition(
        prompt, {.max_chunks = reader_->traits().max_chunks, .height = 16, .width = 16}, "prompts",
        &violations, read ? read : &ignored);
    EXPECT_TRUE(violations.empty());
    return tokens;
  }

  /// Of a request that names none.
  TokenizedPrompt Negative(int size) {
    PromptRead ignored;
    std::vector<FieldViolation> violations;
    return reader_->Negative({}, {.max_chunks = 1, .height = size, .width = size}, "prompts",
                             &violations, &ignored);
  }

  struct Set {
    std::vector<float> keys_values;  // of the tokens that it has
    std::vector<float> vector;
    int tokens = 0;
  };
  Set Read(int set) {
    const auto download = [&](const Tensor& tensor) {
      auto read = backend_->BeginDownload(tensor)->Wait();
      DENOISED_CHECK(read.ok(), "{}", read.status().ToString());
      return *std::move(read);
    };
    const ConditionSets& sets = conditioner->sets();
    Set made;
    made.tokens = download(sets.key_counts.Slice(set, 1)).as<int32_t>()[0];
    const Tensor all = download(sets.keys_values.Slice(set, 1));
    made.keys_values = all.ToFloats();
    made.keys_values.resize(made.tokens * all.dim(2));
    if (sets.vectors) made.vector = download(sets.vectors.Slice(set, 1)).ToFloats();
    return made;
  }
  std::vector<Set> Make(const std::vector<TokenizedPrompt>& prompts) {
    std::vector<int> sets;
    for (const TokenizedPrompt& prompt : prompts) sets.push_back(conditioner->Acquire(prompt));
    CapturedRun::Ran ran;
    const absl::StatusOr<int> encoded = conditioner->Encode(&ran);
    EXPECT_TRUE(encoded.ok()) << encoded.status();
    std::vector<Set> made;
    for (const int set : sets) made.push_back(Read(set));
    for (const int set : sets) conditioner->Release(set);
    return made;
  }

  Backend& backend() { return *backend_; }

  std::unique_ptr<Pipeline> pipeline;
  std::unique_ptr<SchedulerConfig> scheduler;
  std::unique_ptr<Conditioner> conditioner;

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<PromptReader> reader_;
};

bool Same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

/// Tokens of one word each, so that a test knows where a chunk ends.
std::string Words(int count, const std::string& word = "apple") {
  std::string text;
  for (int i = 0; i < count; ++i) text += " " + word;
  return text;
}

class ConditionerTest : public ::testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  void SetUp() override {
    if (device() == "cuda") DENOISED_NEEDS_GPU();
  }
  std::string family() const { return std::get<0>(GetParam()); }
  std::string device() const { return std::get<1>(GetParam()); }
};

/// A long prompt is what its chunks are as prompts of their own, one after the other.
TEST_P(ConditionerTest, ALongPromptIsItsChunks) {
  Prompted prompted(family(), device(), 3);
  const TokenizedPrompt all = prompted.Tokens("red" + Words(1) + Words(160, "table"));
  ASSERT_GE(all.chunks, 2);
  std::vector<TokenizedPrompt> parts;
  for (int chunk = 0; chunk < all.chunks; ++chunk) {
    TokenizedPrompt& part = parts.emplace_back(all);
    part.chunks = 1;
    for (size_t e = 0; e < all.ids.size(); ++e) {
      const auto begin = all.ids[e].begin() + chunk * 77;
      part.ids[e].assign(begin, begin + 77);
    }
  }
  const Prompted::Set whole = prompted.Make({all}).front();
  const auto made = prompted.Make(parts);
  EXPECT_EQ(whole.tokens, all.chunks * 77);
  std::vector<float> joined;
  for (const Prompted::Set& part : made) {
    EXPECT_EQ(part.tokens, 77);
    joined.insert(joined.end(), part.keys_values.begin(), part.keys_values.end());
  }
  EXPECT_TRUE(Same(whole.keys_values, joined));
  // The pooled state is that of the first chunk.
  EXPECT_TRUE(Same(whole.vector, made[0].vector));
  EXPECT_FALSE(Same(made[0].keys_values, made[1].keys_values));
}

/// Neither the pool's width nor the prompts that are encoded beside it change a set.
TEST_P(ConditionerTest, BitsDependOnThePromptAlone) {
  Prompted narrow(family(), device(), 1), wide(family(), device(), 3);
  const std::vector<std::string> texts = {"a red apple", "", Words(300), "thin threads", Words(80)};
  std::vector<TokenizedPrompt> prompts;
  for (const std::string& text : texts) prompts.push_back(wide.Tokens(text));
  EXPECT_THAT(std::vector({prompts[0].chunks, prompts[2].chunks, prompts[4].chunks}),
              ElementsAre(1, 3, prompts[4].chunks));
  const auto together = wide.Make(prompts);
  for (size_t i = 0; i < texts.size(); ++i) {
    Prompted alone(family(), device(), 3);
    const Prompted::Set set = alone.Make({prompts[i]}).front();
    EXPECT_TRUE(Same(set.keys_values, together[i].keys_values)) << texts[i];
    EXPECT_TRUE(Same(set.vector, together[i].vector)) << texts[i];
    if (prompts[i].chunks > 1) continue;
    const Prompted::Set same = narrow.Make({narrow.Tokens(texts[i])}).front();
    EXPECT_EQ(set.tokens, same.tokens);
    EXPECT_TRUE(Same(set.keys_values, same.keys_values)) << texts[i];
    EXPECT_TRUE(Same(set.vector, same.vector)) << texts[i];
  }
}

/// More chunks than are encoded side by side, and sets that are used again with another length.
TEST_P(ConditionerTest, SetsAreUsedAgain) {
  Prompted prompted(family(), device(), 3, 6);
  Prompted fresh(family(), device(), 3, 6);
  for (int round = 0; round < 3; ++round) {
    std::vector<TokenizedPrompt> prompts;
    for (int i = 0; i < 6; ++i)
      prompts.push_back(prompted.Tokens(fmt::format("{}{}", i, Words((i + round) % 3 * 80))));
    const auto made = prompted.Make(prompts);
    for (size_t i = 0; i < prompts.size(); ++i) {
      const Prompted::Set alone = fresh.Make({prompts[i]}).front();
      EXPECT_EQ(made[i].tokens, alone.tokens);
      EXPECT_TRUE(Same(made[i].keys_values, alone.keys_values)) << round << " " << i;
    }
  }
}

/// Prompts that differ in their numbers alone share what the encoders made of their texts, with the
/// bits that each has alone: from a set that is there, or from one that is made with it.
TEST_P(ConditionerTest, EqualTextsOfOtherSizesAreEncodedOnce) {
  Prompted prompted(family(), device(), 2, 9);  // none is given up
  const auto sized = [&](const std::string& text, float size) {
    TokenizedPrompt tokens = prompted.Tokens(text);
    std::fill(tokens.sizes.begin(), tokens.sizes.end(), size);
    tokens.guidance = size;
    return tokens;
  };
  const auto alone = [&](const TokenizedPrompt& tokens) {
    return Prompted(family(), device(), 2).Make({tokens}).front();
  };
  TokenizedPrompt zeros = sized("", 3);
  zeros.ids.clear();
  zeros.ends.clear();
  TokenizedPrompt other_zeros = zeros;
  other_zeros.guidance = 4;
  const std::string longer = Words(100);
  for (const std::vector<TokenizedPrompt>& round :
       {std::vector{sized("a red apple", 16), sized(longer, 16)},
        std::vector{sized("a red apple", 24), sized(longer, 24), sized("a red table", 16),
                    sized("a red table", 24)},
        std::vector{zeros, other_zeros, sized("a red apple", 32)}}) {
    const auto made = prompted.Make(round);
    for (size_t i = 0; i < round.size(); ++i) {
      const Prompted::Set expected = alone(round[i]);
      EXPECT_EQ(made[i].tokens, expected.tokens) << i;
      EXPECT_TRUE(Same(made[i].keys_values, expected.keys_values)) << i;
      EXPECT_TRUE(Same(made[i].vector, expected.vector)) << i;
    }
  }
  EXPECT_EQ(prompted.conditioner->encoded(), 4)
      << "an apple, a longer text, a table and zeros, once each";
}

/// Nor does it take part in what others are told of: made and known prompts.
TEST_P(ConditionerTest, APromptThatNobodyWantsAnyMoreIsNotMade) {
  Prompted prompted(family(), device(), 1, 2);
  Conditioner& conditioner = *prompted.conditioner;
  const TokenizedPrompt apple = prompted.Tokens("a red apple");
  const Prompted::Set expected = prompted.Make({apple}).front();
  // All sets but one are in use, so the third prompt gets that of the second.
  const int kept = conditioner.Acquire(prompted.Tokens("an oven"));
  conditioner.Release(conditioner.Acquire(prompted.Tokens("thin threads")));
  const int set = conditioner.Acquire(apple);
  CapturedRun::Ran ran;
  const auto made = conditioner.Encode(&ran);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(*made, 2);
  EXPECT_TRUE(Same(prompted.Read(set).keys_values, expected.keys_values));
  conditioner.Release(kept);
  conditioner.Release(set);
  conditioner.Release(conditioner.Acquire(prompted.Tokens("thin threads")));
  EXPECT_EQ(conditioner.Encode(&ran).value(), 0);
}

INSTANTIATE_TEST_SUITE_P(Families, ConditionerTest,
                         ::testing::Combine(::testing::Values("sd1", "sdxl"),
                                            ::testing::Values("cpu", "cuda")),
                         [](const auto& info) {
                           return fmt::format("{}_{}", std::get<0>(info.param),
                                              std::get<1>(info.param));
                         });

/// Images that a job told, and nothing else.
class Drawn : public JobListener {
 public:
  explicit Drawn(std::map<uint64_t, std::vector<float>>* images) : images_(images) {}
  void OnImage(ImageResult image) override { (*images_)[image.seed] = image.pixels.ToFloats(); }
  void OnDone(const absl::Status& status, const JobTiming&) override {
    EXPECT_TRUE(status.ok()) << status;
  }

 private:
  std::map<uint64_t, std::vector<float>>* images_;
};

class Runs : public EngineObserver {
 public:
  void OnEvaluation(const std::string&, const std::string&, int, int, double) override {}
  void OnStage(const std::string&, const std::string&, Stage stage, int count, double) override {
    if (stage == Stage::kCondition) conditions.push_back(count);
  }
  void OnPrompts(const std::string&, const std::string&, int hits, int misses) override {
    known += hits;
    made += misses;
  }
  std::vector<int> conditions;
  int known = 0, made = 0;
};

/// Prompts of requests that begin together are made in one call; of those that come later, only
/// what is new.
TEST(Batcher, EncodesThePromptsOfSeveralRequestsTogether) {
  Prompted prompted("sd1", "cpu", 2);
  Admission admission{Admission::Limits()};
  JobQueue queue(admission);
  Runs runs;
  StepBatcher batcher(prompted.backend(), admission, queue, &runs, {});
  ASSERT_TRUE(
      batcher
          .AddModel({.name = "sd1",
                     .denoiser = prompted.pipeline->denoiser,
                     .codec = prompted.pipeline->codec,
                     .text_encoders = {.models = prompted.pipeline->text_encoders, .max_chunks = 2},
                     .max_rows = 16,
                     .slots = 8,
                     .max_evaluations = 20},
                    16, 16)
          .ok());
  std::map<uint64_t, std::vector<float>> images;
  const auto submit = [&](uint64_t seed, const std::string& text, const std::string& negative) {
    auto plan = prompted.scheduler->Compile({.steps = 3});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EffectiveJob job{.steps = 3,
                     .evaluations = static_cast<int>(plan->evaluations.size()),
                     .plan = std::make_shared<const StepPlan>(*plan),
                     .guided = true,
                     .prompts = {prompted.Tokens(text)},
                     .negatives = {prompted.Tokens(negative)}};
    job.spec = {.model = "sd1", .seed = seed, .count = 1, .guidance_scale = 5};
    job.spec.height = job.spec.width = 16;
    ASSERT_TRUE(queue.Submit(job, std::make_shared<Drawn>(&images)).ok());
  };
  const auto run = [&] {
    while (batcher.busy()) ASSERT_TRUE(batcher.Step().ok());
  };
  submit(1, "a red apple", "blurry");
  submit(2, "thin threads", "blurry");
  submit(3, Words(100), "");
  run();
  EXPECT_THAT(runs.conditions, ElementsAre(5)) << "three prompts and two negatives";
  EXPECT_EQ(runs.made, 5);
  EXPECT_EQ(runs.known, 1);
  submit(4, "a red apple", "blurry");
  submit(5, "a red table", "blurry");
  run();
  EXPECT_THAT(runs.conditions, ElementsAre(5, 1));
  EXPECT_EQ(runs.made, 6);
  EXPECT_EQ(runs.known, 4);
  ASSERT_EQ(images.size(), 5u);
  EXPECT_FALSE(Same(images[4], images[5]));
  const std::vector<float> first = images[1];
  submit(1, "a red apple", "blurry");
  run();
  EXPECT_TRUE(Same(images[1], first));
}

/// A GPU that computes nothing. Only captures take time.
class CapturingBackend final : public CountingBackend {
 public:
  CapturingBackend() : CountingBackend(Device::kCuda, DType::kF32) {}
  Capabilities capabilities() const override { return {.pads_rows = true}; }
  absl::StatusOr<std::unique_ptr<Graph>> Capture(const std::function<void()>& body) override {
    ++captures;
    return CountingBackend::Capture(body);
  }
  std::unique_ptr<Marker> Mark() override { return std::make_unique<Moment>(captures); }

  int captures = 0;

 private:
  struct Moment final : Marker {
    explicit Moment(int captures) : captures(captures) {}
    bool reached() override { return true; }
    absl::Status Wait() override { return absl::OkStatus(); }
    double SecondsSince(const Marker& earlier) override {
      return captures - static_cast<const Moment&>(earlier).captures;
    }
    const int captures;
  };
};

/// What a request needs that names no clip_skip.
TEST(Conditioner, WarmUpCapturesAllThatOrdinaryRequestsNeed) {
  for (const std::string family : {"sd1", "sdxl", "lcm"}) {
    for (const int max_chunks : {1, 3, 12}) {
      auto owned = std::make_unique<CapturingBackend>();
      CapturingBackend& backend = *owned;
      Prompted prompted(family, std::move(owned), max_chunks, 16);
      Conditioner& conditioner = *prompted.conditioner;
      int measured = 0;
      while (!conditioner.warm()) {
        const auto seconds = conditioner.WarmUp();
        ASSERT_TRUE(seconds.ok()) << seconds.status();
        if (!*seconds) continue;
        ++measured;
        EXPECT_EQ(**seconds, 0) << "without captures";
      }
      EXPECT_EQ(measured, 1);
      const int captures = backend.captures;
      CapturedRun::Ran ran;
      for (int count = 1; count <= 8; ++count) {
        std::vector<int> sets;
        for (int i = 0; i < count; ++i) {
          TokenizedPrompt prompt =
              prompted.Tokens(fmt::format("{} apples of {}{}", i, count, Words(i * 40)));
          sets.push_back(conditioner.Acquire(prompt));
          if (prompt.sizes.empty() && prompt.guidance == 0) continue;
          for (float& number : prompt.sizes) ++number;
          ++prompt.guidance;
          sets.push_back(conditioner.Acquire(prompt));  // only its numbers are new
        }
        for (const int size : {16, 16 * count}) {
          if (!conditioner.HasRoom(1)) break;
          sets.push_back(conditioner.Acquire(prompted.Negative(size)));
        }
        ASSERT_TRUE(conditioner.Encode(&ran).ok());
        for (const int set : sets) conditioner.Release(set);
      }
      EXPECT_EQ(backend.captures, captures) << family << ", " << max_chunks << " chunks";
      // Its graph is captured when it is first needed, which is not a part of its time.
      TokenizedPrompt skipping = prompted.Tokens("an apple");
      ++skipping.skip_layers;
      conditioner.Acquire(skipping);
      ASSERT_TRUE(conditioner.Encode(&ran).ok());
      EXPECT_EQ(backend.captures, captures + 1);
      EXPECT_EQ(ran.end->SecondsSince(*ran.begin), 0);
    }
  }
}

/// An encoder that needs more memory where it skips layers, as CLIP does if it also pools: it keeps
/// the states of the earlier layer.
class HungryEncoder : public TextEncoder {
 public:
  explicit HungryEncoder(std::shared_ptr<const TextEncoder> encoder)
      : encoder_(std::move(encoder)) {}
  const TextEncoderTraits& traits() const override { return encoder_->traits(); }
  TextOutput Forward(nn::Context& context, const TextInput& input,
                     const TextOptions& options) const override {
    if (options.skip_layers > 0) context.New({1 << 22});
    return encoder_->Forward(context, input, options);
  }

 private:
  const std::shared_ptr<const TextEncoder> encoder_;
};

TEST(ConditionerMemory, SufficesForEveryClipSkip) {
  for (const std::string family : {"sd1", "sdxl"}) {
    Prompted prompted(family, "cpu", 1);
    int layers = std::numeric_limits<int>::max();
    for (const auto& encoder : prompted.pipeline->text_encoders)
      layers = std::min(layers, encoder->traits().layers);
    ASSERT_GE(layers, 3);
    for (int skip = prompted.pipeline->skip_layers; skip < layers; ++skip) {
      std::vector<TokenizedPrompt> prompts;
      for (int i = 0; i < 8; ++i) {
        prompts.push_back(prompted.Tokens(fmt::format("apple {}", i)));
        prompts.back().skip_layers = skip;
      }
      EXPECT_EQ(prompted.Make(prompts).size(), 8u);
    }
  }
}

TEST(ConditionerMemory, SufficesWhereLayersAreSkipped) {
  Prompted prompted("sdxl", "cpu", 1);
  ASSERT_GT(prompted.pipeline->skip_layers, 0);
  std::vector<std::shared_ptr<const TextEncoder>> hungry;
  for (const auto& encoder : prompted.pipeline->text_encoders)
    hungry.push_back(std::make_shared<HungryEncoder>(encoder));
  const auto conditioner =
      Conditioner::Create(prompted.backend(), prompted.pipeline->denoiser,
                          {.models = hungry, .final_norm = prompted.pipeline->final_norm}, 8);
  ASSERT_TRUE(conditioner.ok()) << conditioner.status();
  for (int i = 0; i < 8; ++i) (*conditioner)->Acquire(prompted.Tokens(fmt::format("apple {}", i)));
  CapturedRun::Ran ran;
  EXPECT_TRUE((*conditioner)->Encode(&ran).ok());
}

/// transformers pools at the first token that the encoder's config names, or at the largest id.
TEST(PromptReader, PoolsTheTokenThatTheEncoderNames) {
  const auto files = PipelineFiles::Read(DENOISED_SOURCE_DIR "/tests/models/latent/sdxl");
  ASSERT_TRUE(files.ok()) << files.status();
  TokenizedPrompt tokens;
  const auto pooled = [&](int end_token) {
    const TextEncoderTraits encoder{
        .max_tokens = 77, .layers = 3, .vocabulary = 1 << 20, .end_token = end_token};
    const auto reader = PromptReader::Load(
        files->directory, {.layers = 3, .max_chunks = 1, .encoders = {encoder, encoder}});
    DENOISED_CHECK(reader.ok(), "{}", reader.status().ToString());
    PromptRead read;
    std::vector<FieldViolation> violations;
    tokens = reader->Condition({.text = "a red apple"}, {.height = 16, .width = 16}, "prompts",
                               &violations, &read);
    return tokens.ends[1];
  };
  const int largest = pooled(-1);
  const std::vector<int32_t> ids = tokens.ids[1];
  EXPECT_EQ(largest, std::max_element(ids.begin(), ids.end()) - ids.begin());
  EXPECT_GT(largest, 2);
  EXPECT_EQ(pooled(ids[largest]), largest);
  EXPECT_EQ(pooled(ids[2]), 2) << "a token of the text";
  EXPECT_EQ(pooled(1 << 19), 0) << "no such token";
}

/// As `prompt_2 or prompt` and `negative_prompt_2 or negative_prompt` of diffusers, where these are
/// single texts.
TEST(PromptReader, AnEmptySecondTextIsTheFirst) {
  const auto files = PipelineFiles::Read(DENOISED_SOURCE_DIR "/tests/models/latent/sdxl");
  ASSERT_TRUE(files.ok()) << files.status();
  const auto reader =
      PromptReader::Load(files->directory, {.zeros_without_negative = true, .layers = 3});
  ASSERT_TRUE(reader.ok()) << reader.status();
  std::vector<FieldViolation> violations;
  PromptRead read;
  const auto condition = [&](const TextPrompt& prompt) {
    return reader->Condition(prompt, {}, "prompts", &violations, &read);
  };
  const auto negative = [&](const TextPrompt& prompt) {
    return reader->Negative(prompt, {}, "prompts", &violations, &read);
  };
  const TokenizedPrompt apple = condition({.text = "a red apple"});
  EXPECT_EQ(condition({.text = "a red apple", .text_2 = ""}), apple);
  EXPECT_EQ(read.text_2.tokens, 0) << "it was not read";
  EXPECT_NE(condition({.text = "a red apple", .text_2 = "x"}), apple);
  const TokenizedPrompt blurry = negative({.negative = "blurry"});
  EXPECT_EQ(negative({.negative = "blurry", .negative_2 = ""}), blurry);
  EXPECT_NE(negative({.negative = "blurry", .negative_2 = "x"}), blurry);
  const TokenizedPrompt space = negative({.negative = "blurry", .negative_2 = " "});
  EXPECT_EQ(space.ids[1], negative({.negative = ""}).ids[1]) << "as an empty text";
  EXPECT_TRUE(negative({.negative_2 = ""}).ids.empty()) << "zeros";
  EXPECT_FALSE(negative({.negative = ""}).ids.empty());
  EXPECT_TRUE(violations.empty());
}

/// What is read and what is cut off is told, of each text.
TEST(PromptReader, TellsWhatIsReadOfLongTexts) {
  Prompted prompted("sdxl", "cpu", 2);
  const std::string end = " thin threads";
  const int per_word = prompted.Tokens("apple").chunks;  // 1: the word is short
  ASSERT_EQ(per_word, 1);
  PromptRead read;
  TokenizedPrompt tokens = prompted.Tokens("an oven", &read, Words(400) + end);
  EXPECT_EQ(tokens.chunks, 2) << "of the longer text";
  EXPECT_EQ(tokens.ids[0].size(), 2 * 77u) << "the shorter has an empty chunk";
  EXPECT_EQ(tokens.ids[1].size(), 2 * 77u);
  EXPECT_GT(read.text.tokens, 0);
  EXPECT_LT(read.text.tokens, 75);
  EXPECT_EQ(read.text.cut_off, "");
  EXPECT_EQ(read.text_2.tokens, 150);
  EXPECT_THAT(read.text_2.cut_off, ::testing::EndsWith(end));
  EXPECT_EQ(read.negative.tokens, 0);
  // The empty chunk is begin, end and padding, as an empty prompt's.
  const TokenizedPrompt empty = prompted.Tokens("");
  EXPECT_TRUE(std::equal(empty.ids[0].begin(), empty.ids[0].end(), tokens.ids[0].begin() + 77));
}

}  // namespace
}  // namespace denoised
