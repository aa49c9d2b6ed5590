// SPDX-License-Identifier: Apache-2.0
// What denoised --check says, with a FakeEngine for the device.

#include "server/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <sstream>
#include <thread>

#include "server/security/acceptor.h"
#include "server/telemetry/metrics.h"
#include "tests/io/temporary_directory.h"
#include "tests/server/fake_engine.h"
#include "tests/tls/certificates.h"

namespace denoised {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

class CheckTest : public ::testing::Test {
 protected:
  CheckTest() {
    const KeyPair pair = authority_.Issue("server", "IP:127.0.0.1");
    config_.listen = "127.0.0.1:0";
    config_.http_listen = "127.0.0.1:0";
    config_.metrics_listen = "127.0.0.1:0";
    config_.models = {{"digits", "models/digits"}};
    config_.security.tls_cert = directory_.Write("server.crt", pair.certificate);
    config_.security.tls_key = directory_.Write("server.key", pair.key);
    config_.security.tls_client_ca = directory_.Write("ca.crt", authority_.certificate());
    config_.security.clients =
        directory_.Write("clients.json", R"({"ops": {"certificates": ["ops.example.org"]}})");
  }

  std::string Report(const absl::StatusOr<std::unique_ptr<Engine>>& engine) {
    std::ostringstream report;
    failure_ = Check(config_, engine, report);
    return report.str();
  }
  std::string Report() { return Report(std::make_unique<FakeEngine>(FakeEngineOptions{})); }

  TemporaryDirectory directory_;
  TestAuthority authority_;
  Config config_;
  absl::Status failure_;
};

TEST_F(CheckTest, SaysWhatEverythingIs) {
  EXPECT_THAT(Report(), MatchesRegex("ok      certificate .*server.crt  expires 20..-..-.. .* UTC\n"
                                     "ok      client authority .*ca.crt\n"
                                     "ok      clients .*clients.json\n"
                                     "ok      listen 127.0.0.1:0\n"
                                     "ok      http 127.0.0.1:0\n"
                                     "ok      metrics 127.0.0.1:0\n"
                                     "ok      device fake:0  no device at all\n"
                                     "ok      device fake:1  no device at all\n"
                                     "ok      model digits@1  models/digits  UNet2DModel, 1.0 M "
                                     ".*; an image drawn in .* s\n"));
  EXPECT_TRUE(failure_.ok()) << failure_;
}

/// As of weights that are not finite, which a load does not see.
TEST_F(CheckTest, AModelThatCannotDrawFails) {
  auto engine = std::make_unique<FakeEngine>(FakeEngineOptions{});
  FakeEngine* const fake = engine.get();
  fake->Pause(true);
  int steps = 0;
  std::thread failing;
  fake->OnSubmit([&](const JobSpec& spec) {
    steps = spec.sampler.steps;
    failing = std::thread([fake] {
      while (fake->QueuedImages("") == 0) std::this_thread::yield();
      fake->FailJobs(absl::DataLossError("image 0 is not finite"));
    });
  });
  EXPECT_THAT(Report(std::move(engine)),
              HasSubstr("failed  model digits@1: image 0 is not finite"));
  failing.join();
  EXPECT_EQ(steps, 4) << "of 10, which is enough";
  EXPECT_FALSE(failure_.ok());
  EXPECT_FALSE(IsWrongSetting(failure_)) << "the server would start";
}

TEST_F(CheckTest, OneFailureIsEnough) {
  const KeyPair other = authority_.Issue("server", "IP:127.0.0.1");
  config_.security.tls_key = directory_.Write("server.key", other.key);
  EXPECT_THAT(Report(), HasSubstr("failed  certificate"));
  EXPECT_TRUE(IsWrongSetting(failure_));
}

TEST_F(CheckTest, AnExpiredCertificateFails) {
  const KeyPair pair = authority_.Issue("server", "IP:127.0.0.1", std::chrono::seconds(-1));
  config_.security.tls_cert = directory_.Write("server.crt", pair.certificate);
  config_.security.tls_key = directory_.Write("server.key", pair.key);
  EXPECT_THAT(Report(), HasSubstr("server.crt: it expired"));
  EXPECT_FALSE(failure_.ok());
  EXPECT_FALSE(IsWrongSetting(failure_)) << "a server starts with it";
}

TEST_F(CheckTest, OneAddressForTwoPortsFails) {
  Metrics metrics;
  const int free = (*Acceptor::Listen("--listen", "127.0.0.1:0", 1, &metrics))->port();
  config_.listen = config_.metrics_listen = "127.0.0.1:" + std::to_string(free);
  EXPECT_THAT(Report(), HasSubstr("failed  metrics 127.0.0.1:"));
  EXPECT_FALSE(failure_.ok());
  EXPECT_FALSE(IsWrongSetting(failure_)) << "as of a port that another program has";
  config_.metrics_listen = "";
  config_.http_listen = config_.listen;
  EXPECT_THAT(Report(), HasSubstr("failed  http 127.0.0.1:"));
}

TEST_F(CheckTest, WhatTheStateDirectoryRestoresIsTried) {
  config_.model_roots = {directory_.path()};
  config_.state_dir = directory_ / "state";
  for (const char* name : {"good", "broken"}) {
    std::filesystem::create_directories(directory_ / name);
  }
  directory_.Write("state/models.json", fmt::format(R"({{"format": 1, "aliases": {{}}, "models": [
      {{"name": "digits", "configured": "models/digits", "current": "2",
        "versions": [{{"version": "2", "directory": "{0}/broken"}}]}},
      {{"name": "faces", "configured": null, "current": "new",
        "versions": [{{"version": "new", "directory": "{0}/good"}}]}}]}})",
                                                    directory_.path()));
  const std::string report = Report();
  EXPECT_THAT(report, HasSubstr("ok      state directory"));
  EXPECT_THAT(report, HasSubstr("failed  model digits@2: saved in --state-dir"));
  EXPECT_THAT(report, HasSubstr("ok      model digits@1  models/digits")) << "as the server would";
  EXPECT_THAT(report, HasSubstr("ok      model faces@new"));
  EXPECT_FALSE(failure_.ok());
  EXPECT_FALSE(IsWrongSetting(failure_)) << "the server would serve the others";

  directory_.Write("state/models.json", "{");
  EXPECT_THAT(Report(), AllOf(HasSubstr("failed  state directory"), HasSubstr("models.json"),
                              HasSubstr("ok      model digits@1  models/digits")));
  EXPECT_TRUE(IsWrongSetting(failure_));
}

TEST_F(CheckTest, MakesNoStateDirectory) {
  config_.state_dir = directory_ / "not/yet";
  EXPECT_THAT(Report(), HasSubstr("ok      state directory " + config_.state_dir + "  will be"));
  EXPECT_FALSE(std::filesystem::exists(directory_ / "not"));
  config_.state_dir = directory_ / "clients.json/state";  // below a file, which stops root too
  EXPECT_THAT(Report(), HasSubstr("failed  state directory"));
}

TEST_F(CheckTest, WithoutADeviceTheRestIsTriedAllTheSame) {
  const std::string report = Report(absl::UnavailableError("there is no GPU"));
  EXPECT_THAT(report, HasSubstr("ok      clients"));
  EXPECT_THAT(report, HasSubstr("failed  device auto: there is no GPU\n"
                                "failed  model digits@1: not tried"));
  EXPECT_FALSE(failure_.ok());
  EXPECT_FALSE(IsWrongSetting(failure_));
}

/// A service manager restarts no server whose settings are wrong.
TEST_F(CheckTest, AWrongSettingIsToldFromOtherFailuresBeforeIt) {
  Metrics metrics;
  const auto other = Acceptor::Listen("--listen", "127.0.0.1:0", 1, &metrics);
  config_.listen = "127.0.0.1:" + std::to_string((*other)->port());
  Report();
  EXPECT_FALSE(failure_.ok());
  EXPECT_FALSE(IsWrongSetting(failure_));
  Report(InvalidArgument("max_rows is 1; use 2 to 1024"));
  EXPECT_THAT(std::string(failure_.message()), HasSubstr("max_rows"));
  EXPECT_TRUE(IsWrongSetting(failure_));
}

}  // namespace
}  // namespace denoised
