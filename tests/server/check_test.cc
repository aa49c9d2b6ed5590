// SPDX-License-Identifier: Apache-2.0
// What denoised --check says, with a FakeEngine for the device.

#include "server/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <sstream>

#include "server/security/acceptor.h"
#include "server/telemetry/metrics.h"
#include "tests/io/temporary_directory.h"
#include "tests/server/fake_engine.h"
#include "tests/tls/certificates.h"

namespace denoised {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

class CheckTest : public ::testing::Test {
 protected:
  CheckTest() {
    const KeyPair pair = authority_.Issue("server", "IP:127.0.0.1");
    config_.listen = "127.0.0.1:0";
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
    good_ = Check(config_, engine, report);
    return report.str();
  }
  std::string Report() { return Report(std::make_unique<FakeEngine>(FakeEngineOptions{})); }

  TemporaryDirectory directory_;
  TestAuthority authority_;
  Config config_;
  bool good_ = false;
};

TEST_F(CheckTest, SaysWhatEverythingIs) {
  EXPECT_THAT(Report(),
              MatchesRegex("ok      certificate .*server.crt  expires 20..-..-.. .* UTC\n"
                           "ok      client authority .*ca.crt\n"
                           "ok      clients .*clients.json\n"
                           "ok      listen 127.0.0.1:0\n"
                           "ok      metrics 127.0.0.1:0\n"
                           "ok      device fake:0  no device at all\n"
                           "ok      device fake:1  no device at all\n"
                           "ok      model digits  models/digits  UNet2DModel, 1.0 M .*\n"));
  EXPECT_TRUE(good_);
}

TEST_F(CheckTest, OneFailureIsEnough) {
  const KeyPair other = authority_.Issue("server", "IP:127.0.0.1");
  config_.security.tls_key = directory_.Write("server.key", other.key);
  EXPECT_THAT(Report(), HasSubstr("failed  certificate"));
  EXPECT_FALSE(good_);
}

TEST_F(CheckTest, AnExpiredCertificateFails) {
  const KeyPair pair = authority_.Issue("server", "IP:127.0.0.1", std::chrono::seconds(-1));
  config_.security.tls_cert = directory_.Write("server.crt", pair.certificate);
  config_.security.tls_key = directory_.Write("server.key", pair.key);
  EXPECT_THAT(Report(), HasSubstr("server.crt: it expired"));
  EXPECT_FALSE(good_);
}

TEST_F(CheckTest, OneAddressForTwoPortsFails) {
  Metrics metrics;
  const int free = (*Acceptor::Listen("127.0.0.1:0", 1, &metrics))->port();
  config_.listen = config_.metrics_listen = "127.0.0.1:" + std::to_string(free);
  EXPECT_THAT(Report(), HasSubstr("failed  metrics 127.0.0.1:"));
}

TEST_F(CheckTest, WithoutADeviceTheRestIsTriedAllTheSame) {
  const std::string report = Report(absl::UnavailableError("there is no GPU"));
  EXPECT_THAT(report, HasSubstr("ok      clients"));
  EXPECT_THAT(report, HasSubstr("failed  device auto: there is no GPU\n"
                                "failed  model digits: not tried"));
  EXPECT_FALSE(good_);
}

}  // namespace
}  // namespace denoised
