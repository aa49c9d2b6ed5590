// SPDX-License-Identifier: Apache-2.0
#include "server/models/catalog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <future>
#include <latch>
#include <random>
#include <set>
#include <thread>

#include "server/api/admin_calls.h"
#include "server/status/model_name.h"
#include "server/status/status_details.h"
#include "server/telemetry/log.h"
#include "server/telemetry/metrics.h"
#include "tests/eventually.h"
#include "tests/io/temporary_directory.h"
#include "tests/server/fake_engine.h"

namespace denoised {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Hears the end of a job and nothing else.
class Quiet : public JobListener {
 public:
  void OnImage(ImageResult) override {}
  void OnDone(const absl::Status& status, const JobTiming&) override { done.set_value(status); }
  std::promise<absl::Status> done;
};

class CatalogTest : public ::testing::Test {
 protected:
  CatalogTest() : catalog_(Options({{"digits", Dir("digits")}}), &engine_, &metrics_) {
    log::Configure(log::Format::kText, log::Level::kError);
  }
  ~CatalogTest() override { engine_.Drain(std::chrono::steady_clock::now()); }

  /// A directory that models may be loaded from.
  std::string Dir(const std::string& name) const {
    std::filesystem::create_directories(root_ / name);
    return root_ / name;
  }
  CatalogOptions Options(const std::vector<ModelSource>& models,
                         const std::string& state_dir = "") const {
    auto options = MakeCatalogOptions(models, {root_.path()}, state_dir);
    EXPECT_TRUE(options.ok()) << options.status().message();
    return options.ok() ? *std::move(options) : CatalogOptions();
  }

  /// The version that `name` means, such as "digits@1"; empty when there is none.
  std::string Means(const std::string& name) const {
    const auto model = catalog_.Find(name);
    return model ? EngineName(model->name, model->version) : "";
  }
  std::vector<std::string> Listed() const {
    std::vector<std::string> all;
    for (const CatalogModel& model : catalog_.All()) {
      all.push_back(EngineName(model.name, model.version) + (model.current ? "*" : ""));
    }
    return all;
  }

  /// A job of the engine's model of this name.
  std::shared_ptr<Quiet> Submit(const std::string& engine_name) {
    std::vector<FieldViolation> violations;
    const auto listener = std::make_shared<Quiet>();
    auto job = engine_.Resolve({.model = engine_name}, &violations);
    EXPECT_TRUE(job.ok() && engine_.Submit(*job, listener, nullptr).ok());
    return listener;
  }

  const TemporaryDirectory root_;
  Metrics metrics_;
  FakeEngine engine_;
  Catalog catalog_;
};

TEST_F(CatalogTest, ListedModelsLoadWhenAsked) {
  EXPECT_EQ(catalog_.Find("digits")->info->state, ModelState::kLoading);
  EXPECT_TRUE(catalog_.LoadListed("digits").ok());
  EXPECT_EQ(catalog_.Find("digits")->info->state, ModelState::kReady);
  EXPECT_EQ(Means("digits"), "digits@1");
  EXPECT_EQ(Means("digits@1"), "digits@1");
  EXPECT_EQ(Means("digits@2"), "");
  EXPECT_EQ(Means("faces"), "");
  EXPECT_EQ(Means("@"), "");
  EXPECT_EQ(Means("digits@"), "");
}

TEST_F(CatalogTest, VersionsComeAndGo) {
  ASSERT_TRUE(catalog_.LoadListed("digits").ok());
  ASSERT_TRUE(catalog_.Load({.name = "digits", .directory = Dir("new")}).ok());
  EXPECT_THAT(Listed(), ElementsAre("digits@1", "digits@2*"));
  ASSERT_TRUE(catalog_.Load({.name = "digits", .version = "canary", .keep_current = true}).ok());
  EXPECT_THAT(Listed(), ElementsAre("digits@1", "digits@2*", "digits@canary"));
  EXPECT_EQ(catalog_.Find("digits@canary")->info->directory, Dir("new")) << "as the current one";

  const auto taken = catalog_.Load({.name = "digits", .version = "2"});
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(taken.status().message()), HasSubstr("version"));

  ASSERT_TRUE(catalog_.Unload("digits@2").ok());
  EXPECT_THAT(Listed(), ElementsAre("digits@1", "digits@canary*")) << "loaded last of the others";
  EXPECT_EQ(engine_.Find("digits@2"), nullptr);
  ASSERT_TRUE(catalog_.Unload("digits").ok());
  EXPECT_THAT(Listed(), ElementsAre());
  EXPECT_EQ(catalog_.Unload("digits").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(catalog_.Load({.name = "faces"}).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(catalog_.Load({.name = "digits"}).ok()) << "from the configured directory";
  EXPECT_EQ(catalog_.Find("digits")->info->directory, Dir("digits"));
  EXPECT_EQ(Means("digits"), "digits@1");
}

TEST_F(CatalogTest, ADirectoryThatIsNotSaidIsTheConfiguredOneBeforeThatOfTheRoots) {
  const std::string elsewhere = Dir("elsewhere");
  Catalog catalog(Options({{"digits", elsewhere}}), &engine_, &metrics_);
  for (const char* file : {"digits/config.json", "faces/config.json"}) root_.Write(file, "{}");
  ASSERT_TRUE(catalog.LoadListed("digits").ok());
  ASSERT_TRUE(catalog.Unload("digits").ok());
  ASSERT_TRUE(catalog.Load({.name = "digits"}).ok());
  EXPECT_EQ(catalog.Find("digits")->info->directory, elsewhere);
  ASSERT_TRUE(catalog.Load({.name = "faces"}).ok());
  EXPECT_EQ(catalog.Find("faces")->info->directory, Dir("faces"));
  ASSERT_TRUE(catalog.SetAlias("best", "digits").ok());
  EXPECT_EQ(catalog.Load({.name = "best"}).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(CatalogTest, ABadVersionLeavesTheOldOneServing) {
  ASSERT_TRUE(catalog_.LoadListed("digits").ok());
  const auto bad =
      catalog_.Load({.name = "digits", .directory = Dir("broken"), .unload_previous = true});
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(bad.status().message()), HasSubstr("broken/config.json"));
  EXPECT_THAT(Listed(), ElementsAre("digits@1*"));
  EXPECT_FALSE(catalog_.Load({.name = "faces", .directory = Dir("broken")}).ok());
  EXPECT_THAT(Listed(), ElementsAre("digits@1*"));
}

TEST_F(CatalogTest, AListedModelThatFailedStaysListedUntilAGoodOneComes) {
  Catalog catalog(Options({{"digits", Dir("broken")}}), &engine_, &metrics_);
  EXPECT_FALSE(catalog.LoadListed("digits").ok());
  EXPECT_EQ(catalog.Find("digits")->info->state, ModelState::kFailed);
  ASSERT_TRUE(catalog.Load({.name = "digits", .directory = Dir("good")}).ok());
  ASSERT_EQ(catalog.All().size(), 1u);
  EXPECT_EQ(catalog.Find("digits")->version, "2");
  EXPECT_EQ(catalog.Find("digits")->info->state, ModelState::kReady);
}

TEST_F(CatalogTest, AnAliasNeedsATargetThatIsReady) {
  EXPECT_EQ(catalog_.SetAlias("latest", "digits").status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Means("latest"), "");
}

TEST_F(CatalogTest, Aliases) {
  ASSERT_TRUE(catalog_.LoadListed("digits").ok());
  ASSERT_TRUE(catalog_.Load({.name = "digits"}).ok());
  ASSERT_TRUE(catalog_.SetAlias("latest", "digits").ok());
  ASSERT_TRUE(catalog_.SetAlias("stable", "digits@1").ok());
  EXPECT_EQ(Means("latest"), "digits@2");
  EXPECT_EQ(Means("stable"), "digits@1");
  EXPECT_THAT(catalog_.Find("digits@1")->aliases, ElementsAre("stable"));
  EXPECT_THAT(catalog_.Find("digits@2")->aliases, ElementsAre("latest"));

  ASSERT_TRUE(catalog_.SetAlias("digits", "digits@1").ok()) << "a model's own name: its current";
  EXPECT_EQ(Means("latest"), "digits@1");

  EXPECT_EQ(catalog_.SetAlias("x", "digits@9").status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(catalog_.Load({.name = "faces", .directory = Dir("faces")}).ok());
  EXPECT_EQ(catalog_.SetAlias("faces", "digits").status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(catalog_.Load({.name = "latest", .directory = Dir("d")}).status().code(),
            absl::StatusCode::kAlreadyExists);

  ASSERT_TRUE(catalog_.Unload("digits@1").ok());
  EXPECT_EQ(Means("stable"), "") << "an alias of nothing is removed";
  EXPECT_EQ(Means("latest"), "digits@2");
  ASSERT_TRUE(catalog_.DeleteAlias("latest").ok());
  EXPECT_EQ(Means("latest"), "");
  EXPECT_EQ(catalog_.DeleteAlias("latest").code(), absl::StatusCode::kNotFound);
}

TEST_F(CatalogTest, AnAliasAndAVersionAreThatVersionOfItsModel) {
  ASSERT_TRUE(catalog_.LoadListed("digits").ok());
  ASSERT_TRUE(catalog_.Load({.name = "digits", .directory = Dir("new")}).ok());
  ASSERT_TRUE(catalog_.SetAlias("any", "digits").ok());
  ASSERT_TRUE(catalog_.SetAlias("first", "digits@1").ok());
  EXPECT_EQ(Means("any"), "digits@2");
  EXPECT_EQ(Means("any@1"), "digits@1");
  EXPECT_EQ(Means("any@3"), "");
  EXPECT_EQ(Means("any@"), "");
  EXPECT_EQ(Means("first@1"), "digits@1");
  EXPECT_EQ(Means("first@2"), "") << "the alias means another version";
}

TEST_F(CatalogTest, TheNextVersionFollowsTheHighestNumber) {
  ASSERT_TRUE(catalog_.LoadListed("digits").ok());
  ASSERT_TRUE(catalog_.Load({.name = "digits", .version = "2147483647"}).ok());
  EXPECT_EQ(catalog_.Load({.name = "digits"})->version, "2147483648");
  ASSERT_TRUE(catalog_.Load({.name = "digits", .version = "99999999999999999999"}).ok());
  ASSERT_TRUE(catalog_.Load({.name = "digits", .version = "9223372036854775807"}).ok());
  ASSERT_TRUE(catalog_.Load({.name = "digits", .version = "3e9"}).ok());
  EXPECT_EQ(catalog_.Load({.name = "digits"})->version, "2147483649") << "those are only names";
}

TEST_F(CatalogTest, RequestsInFlightFinishWithTheOldVersion) {
  ASSERT_TRUE(catalog_.LoadListed("digits").ok());
  engine_.Pause(true);
  const auto listener = Submit("digits@1");

  auto load = std::async(std::launch::async, [&] {
    return catalog_.Load({.name = "digits", .unload_previous = true});
  });
  while (Means("digits") != "digits@2") std::this_thread::sleep_for(1ms);
  EXPECT_EQ(load.wait_for(20ms), std::future_status::timeout) << "the old one is in use";
  EXPECT_EQ(catalog_.Find("digits@1")->info->state, ModelState::kUnloading);
  EXPECT_FALSE(CheckReady(*catalog_.Find("digits@1"), "").ok());
  const absl::Status busy = catalog_.Unload("digits@1");
  EXPECT_EQ(busy.code(), absl::StatusCode::kFailedPrecondition) << busy;
  EXPECT_EQ(ReasonOf(ToGrpc(busy)), reason::kModelLoading);
  EXPECT_EQ(catalog_.SetAlias("old", "digits@1").status().code(),
            absl::StatusCode::kFailedPrecondition);
  engine_.Pause(false);
  EXPECT_TRUE(listener->done.get_future().get().ok());
  EXPECT_TRUE(load.get().ok());
  EXPECT_THAT(Listed(), ElementsAre("digits@2*"));
}

TEST_F(CatalogTest, TheNextLoadDoesNotWaitForTheRequestsOfAVersionThatLeaves) {
  ASSERT_TRUE(catalog_.LoadListed("digits").ok());
  engine_.Pause(true);
  const auto listener = Submit("digits@1");
  const auto replace = [&] {
    return catalog_.Load({.name = "digits", .unload_previous = true}).status();
  };
  auto second = std::async(std::launch::async, replace);
  while (Means("digits") != "digits@2") std::this_thread::sleep_for(1ms);

  EXPECT_TRUE(catalog_.Load({.name = "faces", .directory = Dir("faces")}).ok());
  EXPECT_EQ(replace(), absl::OkStatus()) << "what leaves already is left alone";
  EXPECT_THAT(Listed(), ElementsAre("digits@1", "digits@3*", "faces@1*"));
  engine_.Pause(false);
  EXPECT_TRUE(listener->done.get_future().get().ok());
  EXPECT_TRUE(second.get().ok());
  EXPECT_THAT(Listed(), ElementsAre("digits@3*", "faces@1*"));
}

TEST_F(CatalogTest, AVersionThatIsStillListedToBeLoadedStays) {
  ASSERT_TRUE(
      catalog_.Load({.name = "digits", .directory = Dir("new"), .unload_previous = true}).ok());
  EXPECT_THAT(Listed(), ElementsAre("digits@1", "digits@2*"));
  EXPECT_TRUE(catalog_.LoadListed("digits@1").ok());
  EXPECT_THAT(Listed(), ElementsAre("digits@1", "digits@2*"));
}

/// The engine has a model a moment before the catalog has it.
TEST_F(CatalogTest, WhatTheEngineHasAndTheCatalogNotYetIsStillLoading) {
  std::latch loads{1};
  FakeEngine engine({.on_opened = [&](const std::string& directory) {
    if (directory == Dir("new")) loads.wait();
  }});
  Catalog catalog(Options({{"digits", Dir("digits")}}), &engine, &metrics_);
  ASSERT_TRUE(catalog.LoadListed("digits").ok());
  auto load = std::async(std::launch::async,
                         [&] { return catalog.Load({.name = "digits", .directory = Dir("new")}); });
  ASSERT_TRUE(Eventually([&] { return engine.Find("digits@2") != nullptr; }));
  EXPECT_EQ(catalog.Find("digits@2")->info->state, ModelState::kLoading);
  EXPECT_EQ(catalog.Unload("digits@2").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(catalog.Unload("digits").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(catalog.SetAlias("digits", "digits@2").status().code(),
            absl::StatusCode::kFailedPrecondition);
  loads.count_down();
  const auto loaded = load.get();
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(loaded->version, "2");
  EXPECT_TRUE(catalog.Unload("digits").ok());
  EXPECT_TRUE(catalog.All().empty());
}

/// Loads, unloads, aliases, reloads, lists and draws at once, for ThreadSanitizer above all.
TEST_F(CatalogTest, EverythingAtOnce) {
  const TemporaryDirectory root;
  root.Write("config.json", "{}");
  FakeEngine engine({.evaluation_cost = 20us,
                     .on_opened = [](const std::string&) { std::this_thread::sleep_for(1ms); }});
  Catalog catalog(*MakeCatalogOptions({{"digits", root.path()}}, {root.path(), root_.path()}, ""),
                  &engine, &metrics_);
  ASSERT_TRUE(catalog.LoadListed("digits").ok());
  using absl::StatusCode;
  std::atomic<bool> stop{false};
  std::atomic<int> loaded{0}, unloaded{0}, drawn{0}, aliased{0};
  const auto expect = [](const absl::Status& status, std::set<StatusCode> codes) {
    EXPECT_TRUE(status.ok() || codes.count(status.code())) << status;
    return status.ok();
  };
  std::vector<std::thread> threads;
  /// `round` over and over, with a number of its own each time.
  const auto repeat = [&](const std::function<void(uint32_t)>& round) {
    threads.emplace_back([&stop, round, seed = threads.size()] {
      std::mt19937 random(static_cast<uint32_t>(seed));
      while (!stop) round(random());
    });
  };
  for (int i = 0; i < 2; ++i) {
    repeat([&](uint32_t random) {
      const char* const name = random % 3 == 0 ? "faces" : "digits";
      const auto model = catalog.Load({.name = name,
                                       .directory = random % 29 == 0 ? Dir("broken") : root.path(),
                                       .keep_current = random % 5 == 0,
                                       .unload_previous = random % 2 == 0});
      if (expect(model.status(), {StatusCode::kInvalidArgument})) ++loaded;
    });
    repeat([&](uint32_t random) {
      const std::vector<CatalogModel> all = catalog.All();
      if (all.empty()) return;
      const CatalogModel& model = all[random % all.size()];
      const std::string name =
          random % 11 == 0 ? model.name : EngineName(model.name, model.version);
      if (expect(catalog.Unload(name), {StatusCode::kFailedPrecondition, StatusCode::kNotFound})) {
        ++unloaded;
      }
    });
    repeat([&](uint32_t) {
      const auto model = catalog.Find("digits");
      if (!model || !CheckReady(*model, "").ok()) return;
      std::vector<FieldViolation> violations;
      const auto job = engine.Resolve({.model = model->info->name}, &violations);
      const auto listener = std::make_shared<Quiet>();
      if (!job.ok() || !engine.Submit(*job, listener, nullptr).ok()) return;  // it left meanwhile
      if (expect(listener->done.get_future().get(), {})) ++drawn;
    });
  }
  repeat([&](uint32_t random) {
    const std::set<StatusCode> gone = {StatusCode::kNotFound, StatusCode::kFailedPrecondition};
    const std::string target = "digits" + (random % 2 ? "" : "@" + std::to_string(random % 9));
    if (expect(catalog.SetAlias("latest", target).status(), gone)) ++aliased;
    if (random % 3 == 0) expect(catalog.DeleteAlias("latest"), gone);
    if (random % 4 == 0 && target != "digits") {
      expect(catalog.SetAlias("digits", target).status(), gone);
    }
    const auto latest = catalog.Find("latest");
    EXPECT_TRUE(!latest || latest->name == "digits");
  });
  repeat([&](uint32_t random) {
    root.Write("config.json", std::string(random % 100, ' ') + "{}");
    for (int look = 0; look < 3; ++look) catalog.ReloadChanged();
  });
  std::this_thread::sleep_for(3s);
  const bool enough =
      Eventually([&] { return loaded > 10 && unloaded > 10 && drawn > 10 && aliased > 10; });
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(enough) << loaded << " " << unloaded << " " << drawn << " " << aliased;
  // What the catalog lists is what the engine holds.
  std::set<std::string> listed, held;
  for (const CatalogModel& model : catalog.All()) {
    EXPECT_EQ(model.info->state, ModelState::kReady);
    listed.insert(model.info->name);
  }
  for (const auto& model : engine.Models()) held.insert(model->name);
  EXPECT_EQ(listed, held);
}

TEST_F(CatalogTest, ModelsAreLoadedFromTheRootsAlone) {
  const TemporaryDirectory elsewhere;
  ASSERT_TRUE(catalog_.LoadListed("digits").ok());
  std::filesystem::create_directory_symlink(elsewhere.path(), root_ / "link");
  for (const std::string& directory :
       {elsewhere.path(), root_ / "link", Dir("digits") + "/../..", std::string("/etc"),
        root_ / "absent", std::string("/absent"), root_.path() + "-not"}) {
    const auto refused = catalog_.Load({.name = "digits", .directory = directory});
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << directory;
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("--model-roots")) << directory;
  }
  EXPECT_EQ(engine_.opens(), 1);
  // What is opened is the canonical path: the link may lead elsewhere a moment later.
  Dir("real");
  std::filesystem::create_directory_symlink(root_ / "real", root_ / "inside");
  ASSERT_TRUE(catalog_.Load({.name = "digits", .directory = root_ / "inside"}).ok());
  EXPECT_EQ(catalog_.Find("digits")->info->directory, root_ / "real");
  // And it is looked at again when the model is reloaded.
  std::filesystem::remove(root_ / "real");
  std::filesystem::create_directory_symlink(elsewhere.path(), root_ / "real");
  EXPECT_FALSE(catalog_.Load({.name = "digits"}).ok());
}

TEST_F(CatalogTest, WhatTheConfigurationNamesMayLieAnywhere) {
  const TemporaryDirectory elsewhere;
  Catalog catalog(Options({{"digits", elsewhere.path()}}), &engine_, &metrics_);
  ASSERT_TRUE(catalog.LoadListed("digits").ok());
  EXPECT_TRUE(catalog.Load({.name = "digits"}).ok()) << "a reload";
  EXPECT_FALSE(catalog.Load({.name = "faces", .directory = elsewhere.path()}).ok());
}

/// A catalog over several runs of a server with one --state-dir.
class RestartTest : public CatalogTest {
 protected:
  /// Ends the run before, and starts another with this configuration.
  Catalog& Restart(const std::vector<ModelSource>& models) {
    run_.reset();
    engine_.Drain(std::chrono::steady_clock::now());
    run_engine_ = std::make_unique<FakeEngine>();
    run_ = std::make_unique<Catalog>(Options(models, state_.path()), run_engine_.get(), &metrics_);
    for (const std::string& listed : run_->Listed()) run_->LoadListed(listed).IgnoreError();
    return *run_;
  }
  std::string Models() const {
    std::string all;
    for (const CatalogModel& model : run_->All()) {
      all +=
          fmt::format("{}{}={}{} ", EngineName(model.name, model.version), model.current ? "*" : "",
                      std::filesystem::path(model.info->directory).filename().string(),
                      model.info->state == ModelState::kReady ? "" : "!");
      for (const std::string& alias : model.aliases) all += "(" + alias + ") ";
    }
    return all;
  }

  const TemporaryDirectory state_;
  std::unique_ptr<FakeEngine> run_engine_;
  std::unique_ptr<Catalog> run_;
};

TEST_F(RestartTest, ChangesOfAdminsSurvive) {
  const std::vector<ModelSource> models = {{"digits", Dir("a")}, {"cats", Dir("cats")}};
  Catalog& first = Restart(models);
  EXPECT_EQ(Models(), "digits@1*=a cats@1*=cats ");
  ASSERT_TRUE(first.Load({.name = "digits", .directory = Dir("b"), .unload_previous = true}).ok());
  ASSERT_TRUE(
      first
          .Load(
              {.name = "digits", .directory = Dir("c"), .version = "canary", .keep_current = true})
          .ok());
  ASSERT_TRUE(first.Load({.name = "faces", .directory = Dir("faces")}).ok());
  ASSERT_TRUE(first.SetAlias("best", "digits@canary").ok());
  ASSERT_TRUE(first.SetAlias("gone", "cats").ok());
  ASSERT_TRUE(first.SetAlias("latest", "digits").ok());
  ASSERT_TRUE(first.SetAlias("old", "digits").ok());
  ASSERT_TRUE(first.DeleteAlias("old").ok());
  ASSERT_TRUE(first.Unload("cats").ok());
  const std::string before = Models();
  EXPECT_EQ(before, "digits@2*=b (latest) digits@canary=c (best) faces@1*=faces ");
  Restart(models);
  EXPECT_EQ(Models(), before);
  Catalog& third = Restart(models);
  EXPECT_EQ(Models(), before) << "a run without changes changes nothing";
  // Undone by hand, and nothing is left of it.
  ASSERT_TRUE(third.Load({.name = "cats", .directory = Dir("cats")}).ok());
  ASSERT_TRUE(third.Unload("digits").ok());
  Restart(models);
  EXPECT_EQ(Models(), "cats@1*=cats faces@1*=faces ");
}

TEST_F(RestartTest, AModelWhoseConfigurationChangedStartsAsTheConfigurationSays) {
  Catalog& first = Restart({{"digits", Dir("a")}, {"cats", Dir("cats")}, {"dogs", Dir("dogs")}});
  ASSERT_TRUE(first.Load({.name = "digits", .directory = Dir("b")}).ok());
  ASSERT_TRUE(first.Load({.name = "cats", .directory = Dir("b")}).ok());
  ASSERT_TRUE(first.Load({.name = "faces", .directory = Dir("faces")}).ok());
  ASSERT_TRUE(first.SetAlias("best", "digits@2").ok());
  ASSERT_TRUE(first.SetAlias("any", "digits").ok());
  ASSERT_TRUE(first.Unload("dogs").ok());
  // Another directory for digits; cats is not configured any more, faces and dogs are.
  Restart({{"digits", Dir("new")}, {"faces", Dir("f2")}, {"dogs", Dir("dogs")}});
  EXPECT_EQ(Models(), "digits@1*=new (any) faces@1*=f2 ");
}

TEST_F(RestartTest, AFailedLoadAndWhatIsNotReadyAreNotSaved) {
  const std::vector<ModelSource> models = {{"digits", Dir("a")}};
  Catalog& first = Restart(models);
  EXPECT_FALSE(first.Load({.name = "faces", .directory = Dir("broken")}).ok());
  ASSERT_TRUE(first.SetAlias("x", "digits").ok());
  Restart(models);
  EXPECT_EQ(Models(), "digits@1*=a (x) ");
}

TEST_F(RestartTest, WithoutASavedVersionThatLoadsTheConfiguredDirectoryIsLoaded) {
  const std::vector<ModelSource> models = {{"digits", Dir("a")}};
  Catalog& first = Restart(models);
  ASSERT_TRUE(first.Load({.name = "digits", .directory = Dir("b"), .unload_previous = true}).ok());
  ASSERT_TRUE(first.Load({.name = "digits", .directory = Dir("c")}).ok());
  std::filesystem::remove(root_ / "b");
  Restart(models);
  EXPECT_EQ(Models(), "digits@2=b! digits@3*=c ") << "one of two is enough";
  std::filesystem::remove(root_ / "c");
  Restart(models);
  EXPECT_EQ(Models(), "digits@2=b! digits@3=c! digits@1*=a ");
  EXPECT_THAT(std::string(run_->Find("digits@3")->info->error.message()),
              HasSubstr("saved in --state-dir"));
}

TEST_F(RestartTest, WhatIsSavedMustStillLieInTheRoots) {
  const std::vector<ModelSource> models = {{"digits", Dir("a")}};
  ASSERT_TRUE(Restart(models).Load({.name = "faces", .directory = Dir("faces")}).ok());
  const TemporaryDirectory elsewhere;
  std::filesystem::remove(root_ / "faces");
  std::filesystem::create_directory_symlink(elsewhere.path(), root_ / "faces");
  Restart(models);
  EXPECT_EQ(Models(), "digits@1*=a faces@1*=faces! ");
  EXPECT_THAT(std::string(run_->Find("faces")->info->error.message()), HasSubstr("--model-roots"));
}

TEST_F(RestartTest, AChangeThatCannotBeSavedIsAnError) {
  Catalog& catalog = Restart({{"digits", Dir("a")}});
  // A directory is where the file should be, which stops root too.
  std::filesystem::create_directories(state_ / "models.json/in-the-way");
  const auto alias = catalog.SetAlias("x", "digits");
  EXPECT_EQ(alias.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(alias.status().message()), HasSubstr("made, but not saved"));
  EXPECT_EQ(catalog.Find("x")->name, "digits") << "made";
  std::filesystem::remove_all(state_ / "models.json");
  ASSERT_TRUE(catalog.SetAlias("y", "digits").ok());
  Restart({{"digits", Dir("a")}});
  EXPECT_EQ(Models(), "digits@1*=a (x) (y) ");
}

TEST_F(RestartTest, AnErrorAfterAChangeSaysThatItIsMade) {
  const std::vector<ModelSource> models = {{"digits", Dir("a")}};
  Catalog& catalog = Restart(models);
  ASSERT_TRUE(catalog.Load({.name = "faces", .directory = Dir("faces")}).ok());
  const auto refused = catalog.Load({.name = "faces", .version = "1"});
  EXPECT_FALSE(TookEffect(refused.status())) << refused.status().message();

  run_engine_->set_close_error(Internal("the device is lost"));
  std::filesystem::remove(state_ / "models.json");
  std::filesystem::create_directories(state_ / "models.json/in-the-way");
  const absl::Status both = catalog.Unload("faces");
  EXPECT_TRUE(TookEffect(both));
  EXPECT_THAT(std::string(both.message()),
              AllOf(HasSubstr("made, but not saved"), HasSubstr("faces@1 could not be closed: the "
                                                                "device is lost")));
  EXPECT_EQ(catalog.Find("faces"), std::nullopt);
  std::filesystem::remove_all(state_ / "models.json");
  const auto closed = catalog.Load({.name = "digits", .unload_previous = true});
  EXPECT_TRUE(TookEffect(closed.status()));
  EXPECT_EQ(Models(), "digits@2*=a ");
}

TEST_F(RestartTest, AFileThatCannotBeReadStopsTheStart) {
  const auto error = [&](const std::string& text) {
    state_.Write("models.json", text);
    const auto options = MakeCatalogOptions({{"digits", Dir("a")}}, {}, state_.path());
    EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument) << text;
    return std::string(options.status().message());
  };
  for (
      const char* text : {
          "",
          "[]",
          R"({"format": 2, "models": [], "aliases": {}})",
          R"({"format": 1, "models": {}, "aliases": {}})",
          R"({"format": 1, "models": [], "aliases": []})",
          R"({"format": 1, "models": [], "aliases": {"a b": "digits"}})",
          R"({"format": 1, "models": [], "aliases": {"a": 1}})",
          R"({"format": 1, "models": [1], "aliases": {}})",
          R"({"format": 1, "models": [], "aliases": {}, "more": 1})",
          R"({"format": 1, "models": [{"name": "/", "versions": [], "current": ""}], "aliases": {}})",
          R"({"format": 1, "models": [{"name": "a", "versions": [], "current": "1"}], "aliases": {}})",
          R"({"format": 1, "models": [{"name": "a", "versions": 1, "current": ""}], "aliases": {}})",
          R"({"format": 1, "models": [{"name": "a", "versions": [{"version": "1"}], "current": "1"}],
              "aliases": {}})",
      }) {
    EXPECT_THAT(error(text), AllOf(HasSubstr("models.json"), HasSubstr("move it away"))) << text;
  }
}

TEST_F(RestartTest, OneServerAtATimeHasTheDirectory) {
  Restart({{"digits", Dir("a")}});
  const auto second = MakeCatalogOptions({{"digits", Dir("a")}}, {}, state_.path());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("--state-dir"));
  run_.reset();
  EXPECT_TRUE(MakeCatalogOptions({{"digits", Dir("a")}}, {}, state_.path()).ok());
  const auto file = MakeCatalogOptions({}, {}, root_.Write("file", ""));
  EXPECT_THAT(std::string(file.status().message()), HasSubstr("cannot be opened"));
}

TEST_F(RestartTest, AReloadIsNoChangeOfAnAdmin) {
  const std::vector<ModelSource> models = {{"digits", Dir("a")}, {"cats", Dir("cats")}};
  for (const char* file : {"a/weights", "canary/weights"}) root_.Write(file, "old");
  Catalog& first = Restart(models);
  int writes = 0;
  const auto reload = [&](const std::string& file, Catalog& catalog) {
    root_.Write(file, fmt::format("new {}", ++writes));
    for (int look = 0; look < 2; ++look) catalog.ReloadChanged();
  };
  reload("a/weights", first);
  EXPECT_EQ(Models(), "digits@2*=a cats@1*=cats ");
  EXPECT_FALSE(std::filesystem::exists(state_ / "models.json"));
  ASSERT_TRUE(first.Unload("cats").ok());
  Restart(models);
  EXPECT_EQ(Models(), "digits@1*=a ") << "the change of another model saves no reload";

  Catalog& second = *run_;
  ASSERT_TRUE(
      second.Load({.name = "digits", .directory = Dir("canary"), .version = "canary"}).ok());
  reload("canary/weights", second);
  EXPECT_EQ(Models(), "digits@1=a digits@2*=canary ");
  ASSERT_TRUE(second.SetAlias("best", "digits@2").ok());
  Restart(models);
  EXPECT_EQ(Models(), "digits@1=a digits@canary*=canary (best) ");

  Catalog& third = *run_;
  reload("canary/weights", third);
  reload("canary/weights", third);
  EXPECT_EQ(Models(), "digits@1=a digits@3*=canary (best) ") << "the alias means the new files";
  ASSERT_TRUE(third.Load({.name = "digits", .directory = Dir("b"), .version = "canary"}).ok());
  Restart(models);
  EXPECT_EQ(Models(), "digits@1=a digits@3=canary (best) digits@canary*=b ");
}

class ReloadTest : public CatalogTest {
 protected:
  ReloadTest() {
    root_.Write("mine/unet/config.json", "{}");
    EXPECT_TRUE(catalog_.Load({.name = "mine", .directory = root_ / "mine"}).ok());
  }
};

TEST_F(ReloadTest, AChangedDirectoryIsLoadedOnceItSettled) {
  for (int look = 0; look < 3; ++look) EXPECT_FALSE(catalog_.ReloadChanged());
  EXPECT_EQ(Means("mine"), "mine@1") << "nothing has changed";
  root_.Write("mine/unet/config.json", "{ }");
  EXPECT_TRUE(catalog_.ReloadChanged());
  EXPECT_EQ(Means("mine"), "mine@1") << "perhaps somebody is still writing";
  EXPECT_FALSE(catalog_.ReloadChanged());
  EXPECT_EQ(Means("mine"), "mine@2");
  EXPECT_EQ(catalog_.Find("mine@1"), std::nullopt) << "its place is taken";
  for (int look = 0; look < 3; ++look) catalog_.ReloadChanged();
  EXPECT_EQ(Means("mine"), "mine@2");
}

TEST_F(ReloadTest, ABadChangeIsTriedAgainAfterItWasTakenBack) {
  const std::filesystem::path mine = root_ / "mine", good = root_ / "good", other = root_ / "other";
  root_.Write("other/unet/config.json", "{ }");
  const auto look = [&] {
    for (int i = 0; i < 3; ++i) catalog_.ReloadChanged();
  };
  std::filesystem::rename(mine, good);
  std::filesystem::rename(other, mine);
  engine_.set_broken(mine);
  look();
  EXPECT_EQ(engine_.opens(), 2);
  EXPECT_EQ(Means("mine"), "mine@1");
  std::filesystem::rename(mine, other);
  std::filesystem::rename(good, mine);
  look();
  EXPECT_EQ(engine_.opens(), 2) << "it is loaded";
  engine_.set_broken("broken");  // what it lacked is there now
  std::filesystem::rename(mine, good);
  std::filesystem::rename(other, mine);
  look();
  EXPECT_EQ(Means("mine"), "mine@2");
}

TEST_F(ReloadTest, ABadChangeLeavesTheOldOneAndIsTriedOnce) {
  engine_.set_broken(root_ / "mine");
  root_.Write("mine/unet/weights", "short");
  for (int look = 0; look < 5; ++look) catalog_.ReloadChanged();
  EXPECT_EQ(Means("mine"), "mine@1");
  EXPECT_EQ(catalog_.Find("mine")->info->state, ModelState::kReady);
  EXPECT_EQ(engine_.opens(), 2);
  engine_.set_broken("broken");
  root_.Write("mine/unet/weights", "good");
  for (int look = 0; look < 2; ++look) catalog_.ReloadChanged();
  EXPECT_EQ(Means("mine"), "mine@2");
  std::filesystem::remove_all(root_ / "mine");
  log::Configure(log::Format::kText, log::Level::kInfo);
  testing::internal::CaptureStderr();
  for (int look = 0; look < 4; ++look) catalog_.ReloadChanged();
  const std::string said = testing::internal::GetCapturedStderr();
  log::Configure(log::Format::kText, log::Level::kError);
  const size_t told = said.find("model directory cannot be read");
  EXPECT_NE(told, std::string::npos) << said;
  EXPECT_EQ(said.find("model directory cannot be read", told + 1), std::string::npos)
      << "once is enough: " << said;
  EXPECT_EQ(Means("mine"), "mine@2") << "a directory that is gone is no new version";
}

}  // namespace
}  // namespace denoised
