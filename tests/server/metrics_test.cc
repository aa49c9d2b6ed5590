// SPDX-License-Identifier: Apache-2.0
// docs/metrics.md against a server that was given something to count.

#include "server/telemetry/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <future>
#include <map>
#include <regex>
#include <set>

#include "absl/strings/str_join.h"
#include "server/http/metrics_port.h"
#include "tests/eventually.h"
#include "tests/io/temporary_directory.h"
#include "tests/server/server_fixture.h"
#include "tests/tls/certificates.h"

namespace denoised {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Type and labels of each metric by name, as text that a failing test can show.
using Families = std::map<std::string, std::string>;

std::string Describe(const std::string& type, const std::set<std::string>& labels) {
  std::string text = type + ":";
  for (const std::string& label : labels) text += " " + label;
  return text;
}

std::set<std::string> Matches(const std::string& text, const char* pattern) {
  std::set<std::string> found;
  const std::regex regex(pattern);
  for (std::sregex_iterator it(text.begin(), text.end(), regex), end; it != end; ++it) {
    found.insert((*it)[1]);
  }
  return found;
}

Families Documented() {
  std::ifstream file(std::string(DENOISED_SOURCE_DIR) + "/docs/metrics.md");
  const std::regex row(R"(\| `(\w+)` \| (\w+) \| ([\w, ]*)\| .+ \|)");
  Families families;
  std::smatch match;
  for (std::string line; std::getline(file, line);) {
    if (!std::regex_match(line, match, row)) continue;
    families[match[1]] = Describe(match[2], Matches(match[3], "(\\w+)"));
  }
  return families;
}

Families Scraped(const std::string& text) {
  Families families;
  const std::regex type(R"(# TYPE (\w+) (\w+))");
  for (std::sregex_iterator it(text.begin(), text.end(), type), end; it != end; ++it) {
    const std::string name = (*it)[1];
    std::set<std::string> labels;
    const std::regex series("\n" + name + "(?:_bucket)?\\{([^}]*)\\}");
    for (std::sregex_iterator s(text.begin(), text.end(), series); s != end; ++s) {
      labels.merge(Matches((*s)[1], "(\\w+)=\""));
    }
    labels.erase("le");
    families[name] = Describe((*it)[2], labels);
  }
  return families;
}

double ValueOf(const std::string& text, const std::string& series) {
  const size_t at = text.find("\n" + series + " ");
  return at == std::string::npos ? -1 : std::stod(text.substr(at + series.size() + 2));
}

class MetricsTest : public ServerFixture {
 protected:
  MetricsTest() { config_.metrics_listen = "127.0.0.1:0"; }
};

TEST_F(MetricsTest, TheDocumentListsWhatThereIs) {
  const TestAuthority authority;
  const KeyPair pair = authority.Issue("server", "IP:127.0.0.1");
  const TemporaryDirectory directory;
  config_.security.tls_cert = directory.Write("crt", pair.certificate);
  config_.security.tls_key = directory.Write("key", pair.key);
  Start();
  const auto stub = v1::ImageGeneration::NewStub(
      Connect(grpc::SslCredentials({.pem_root_certs = authority.certificate()})));
  v1::StreamGenerateRequest request;
  request.mutable_params()->set_count(3);
  request.mutable_params()->set_priority(v1::PRIORITY_INTERACTIVE);
  request.mutable_preview();
  grpc::ClientContext context;
  auto reader = stub->StreamGenerate(&context, request);
  v1::StreamGenerateResponse event;
  while (reader->Read(&event)) {
  }
  ASSERT_TRUE(reader->Finish().ok());

  // The last that a call is counted in. A scrape at that moment may lack the others.
  ASSERT_TRUE(Eventually(
      [&] { return Scrape().find("denoised_client_calls_total") != std::string::npos; }));
  const std::string text = Scrape();
  EXPECT_EQ(Scraped(text), Documented());

  EXPECT_EQ(ValueOf(text, "denoised_client_images_total{client=\"anonymous\",model=\"digits\"}"),
            3);
  EXPECT_EQ(
      ValueOf(
          text,
          "denoised_queue_seconds_count{model=\"digits\",priority=\"interactive\",version=\"1\"}"),
      1);
  EXPECT_GE(ValueOf(text, "denoised_connections_total"), 1);
  EXPECT_EQ(ValueOf(text, "denoised_refused_connections_total"), 0);
  EXPECT_EQ(
      ValueOf(text,
              "denoised_wasted_rows_total{reason=\"deadline\",model=\"digits\",version=\"1\"}"),
      0);
  EXPECT_GT(ValueOf(text, "process_resident_memory_bytes"), 1e6);
#ifndef DENOISED_SANITIZED  // they bring an allocator
  EXPECT_GT(ValueOf(text, "denoised_heap_bytes"), 1e5);
#endif
  EXPECT_GT(ValueOf(text, "process_open_fds"), 5);
  EXPECT_GT(ValueOf(text, "process_cpu_seconds_total"), 0);
  const double now = static_cast<double>(std::time(nullptr));
  EXPECT_NEAR(ValueOf(text, "process_start_time_seconds"), now, 600);
  EXPECT_NEAR(ValueOf(text, "denoised_certificate_expiry_time_seconds"), now + 3600, 60);
}

TEST_F(MetricsTest, ImagesThatAreNotFiniteAreCounted) {
  Start();
  for (int i = 0; i < 2; ++i) engine_->observer()->OnNonfiniteImage("digits@1", "fake:0");
  EXPECT_EQ(ValueOf(Scrape(), "denoised_nonfinite_images_total{model=\"digits\",version=\"1\"}"),
            2);
}

TEST_F(MetricsTest, ThePathsAreExact) {
  Start();
  EXPECT_THAT(Get("/healthz"), HasSubstr(" 200 "));
  for (const char* path : {"/metricsx", "/metrics/", "/healthz/x", "/"}) {
    EXPECT_THAT(Get(path), HasSubstr(" 404 ")) << path;
  }
}

TEST_F(MetricsTest, IdleConnectionsDoNotKeepAScrapeWaiting) {
  Start();
  std::vector<int> idle;
  for (int i = 0; i < 8; ++i) idle.push_back(ConnectToMetrics());
  EXPECT_THAT(Scrape(), HasSubstr("denoised_build_info"));
  for (const int fd : idle) close(fd);
}

TEST_F(MetricsTest, StalledConnectionsDoNotKeepAScrapeWaiting) {
  Start();
  std::vector<int> stalled;
  for (int i = 0; i < 64; ++i) {
    stalled.push_back(ConnectToMetrics());
    const std::string_view begun =
        i % 2 ? "GET /met" : "POST /x HTTP/1.1\r\nContent-Length: 9\r\n\r\n";
    ASSERT_EQ(write(stalled.back(), begun.data(), begun.size()),
              static_cast<ssize_t>(begun.size()));
  }
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(Scrape(), HasSubstr("denoised_build_info"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 3s) << "the time of a stalled one";
  for (const int fd : stalled) close(fd);
}

TEST_F(MetricsTest, AnAddressThatCannotBeHadIsNamedWithARemedy) {
  Start();
  const std::string taken = "127.0.0.1:" + std::to_string(server_->metrics_port());
  const absl::Status status = MetricsPort::Listen(taken, 100, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << "it may be free another time";
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("--metrics-listen " + taken), HasSubstr("free port")));
}

TEST_F(MetricsTest, ADrainIsSeen) {
  Start();
  const auto value = [&](const std::string& series) { return ValueOf(Scrape(), series); };
  const auto state = [&](const std::string& name) {
    return value("denoised_server_state{state=\"" + name + "\"}");
  };
  const auto reported_state = [&] {
    grpc::ClientContext context;
    v1::GetServerInfoResponse info;
    EXPECT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
    return info.state();
  };
  EXPECT_EQ(state("serving"), 1);
  EXPECT_EQ(state("draining"), 0);
  EXPECT_EQ(value("denoised_drain_deadline_time_seconds"), 0);

  engine_->Pause(true);
  auto call = std::async(std::launch::async, [&] { return Generate(); });
  ASSERT_TRUE(Eventually([&] { return engine_->QueuedImages("digits@1") == 1; }));
  const double now = static_cast<double>(std::time(nullptr));
  auto drain = std::async(std::launch::async, [&] { server_->Drain(100s, 5s); });
  EXPECT_TRUE(Eventually([&] { return reported_state() == v1::SERVER_STATE_LAME_DUCK; }));
  EXPECT_EQ(state("lame_duck"), 1);
  EXPECT_EQ(state("serving"), 0);
  const double deadline = value("denoised_drain_deadline_time_seconds");
  EXPECT_GE(deadline, now + 105);
  EXPECT_LE(deadline, static_cast<double>(std::time(nullptr)) + 1 + 105);
  EXPECT_TRUE(Eventually([&] { return reported_state() == v1::SERVER_STATE_DRAINING; }));
  EXPECT_EQ(state("draining"), 1);
  EXPECT_EQ(state("lame_duck"), 0);
  engine_->Pause(false);
  EXPECT_TRUE(call.get().ok());
}

TEST_F(MetricsTest, BeyondAHundredClientsTheRestIsOne) {
  Metrics metrics;
  for (int i = 0; i < 150; ++i) metrics.ImageDone("digits", "client " + std::to_string(i));
  metrics.ImageDone("digits", "client 0");
  int series = 0;
  double others = 0;
  for (const auto& family : metrics.Collect()) {
    if (family.name != "denoised_client_images_total") continue;
    series = static_cast<int>(family.metric.size());
    for (const auto& metric : family.metric) {
      if (metric.label[0].value == "other") others = metric.counter.value;
    }
  }
  EXPECT_EQ(series, 101);
  EXPECT_EQ(others, 50);
}

/// The labels of all series of a family: "digits 1, unknown unknown".
std::string Versions(const Metrics& metrics, const std::string& family_name) {
  std::set<std::string> found;
  for (const auto& family : metrics.Collect()) {
    if (family.name != family_name) continue;
    for (const auto& metric : family.metric) {
      std::map<std::string, std::string> labels;
      for (const auto& label : metric.label) labels[label.name] = label.value;
      found.insert(labels["model"] + " " + labels["version"]);
    }
  }
  return absl::StrJoin(found, ", ");
}

TEST_F(MetricsTest, ACanaryIsSeenBesideTheCurrentVersion) {
  Metrics metrics;
  metrics.RequestEnded("digits@1", "OK", 0.1);
  metrics.RequestEnded("digits@2", "INTERNAL", 0.1);
  metrics.RequestEnded("", "NOT_FOUND", 0.1);
  EXPECT_EQ(Versions(metrics, "denoised_requests_total"), "digits 1, digits 2, unknown unknown");
  EXPECT_EQ(Versions(metrics, "denoised_request_seconds"), "digits 1") << "those that succeeded";
}

TEST(RequestTotalsTest, AVersionIsCountedWhileItIsLoaded) {
  RequestTotals totals;
  totals.Begin("digits@1");
  totals.Add("digits@1", {.ok = true, .total = 5ms, .queued = 1ms, .images = 3});
  totals.Add("digits@1", {.ok = false, .total = 7ms});
  EXPECT_EQ(totals.Of("digits@1").images, 3u);
  EXPECT_EQ(totals.Of("digits@1").succeeded_time, 5ms);
  EXPECT_EQ(totals.Of("digits@1").failed_time, 7ms);
  totals.Forget("digits@1");
  totals.Add("digits@1", {.ok = true});  // of a request that ended just after the version left
  EXPECT_EQ(totals.Of("digits@1").succeeded, 0u);
  totals.Begin("digits@1");
  EXPECT_EQ(totals.Of("digits@1").succeeded, 0u) << "since it was loaded again";
}

TEST_F(MetricsTest, AVersionThatIsLoadedAgainHasOnePrecision) {
  Metrics metrics;
  metrics.ModelLoaded("digits@1", "fp8", 0.1);
  metrics.ModelLoaded("digits@1", "bf16", 0.1);
  for (const auto& family : metrics.Collect()) {
    if (family.name != "denoised_model_info") continue;
    ASSERT_EQ(family.metric.size(), 1u);
    for (const auto& label : family.metric[0].label) {
      if (label.name == "precision") {
        EXPECT_EQ(label.value, "bf16");
      }
    }
  }
}

TEST_F(MetricsTest, SeriesOfAVersionGoAWhileAfterIt) {
  Metrics metrics;
  const auto now = Metrics::Clock::now();
  for (const char* model : {"digits@1", "digits@2", ""}) {
    metrics.RequestEnded(model, "OK", 0.1);
    metrics.JobStarted(model, Priority::kBatch, 0.1);
    metrics.FirstPreview(model, 0.1);
    metrics.ImageDone(model, "anonymous");
    metrics.Encoded(model, "png", 0.1);
    metrics.ModelLoaded(model, "fp8", 0.1);
    metrics.OnEvaluation(model, "fake:0", 1, 1, 0.1);
    metrics.OnStage(model, "fake:0", Stage::kCondition, 2, 0.1);
    metrics.OnPrompts(model, "fake:0", 1, 1);
  }
  constexpr const char* kFamilies[] = {
      "denoised_requests_total",     "denoised_request_seconds",
      "denoised_queue_seconds",      "denoised_first_preview_seconds",
      "denoised_images_total",       "denoised_encoding_seconds",
      "denoised_model_info",         "denoised_model_load_seconds",
      "denoised_evaluation_rows",    "denoised_evaluation_seconds",
      "denoised_padding_rows_total", "denoised_stage_seconds",
      "denoised_stage_items_total",  "denoised_prompts_total"};
  metrics.Retain({"digits@1", "digits@2"}, now + 1h);
  metrics.Retain({"digits@2"}, now + 1h + Metrics::kRetention - 1s);
  for (const char* family : kFamilies) {
    EXPECT_EQ(Versions(metrics, family), "digits 1, digits 2, unknown unknown") << family;
  }
  metrics.Retain({"digits@2"}, now + 1h + Metrics::kRetention);
  for (const char* family : kFamilies) {
    EXPECT_EQ(Versions(metrics, family), "digits 2, unknown unknown") << family;
  }
  metrics.ImageDone("digits@1", "anonymous");  // a late one comes back, and goes again
  EXPECT_EQ(Versions(metrics, "denoised_images_total"), "digits 1, digits 2, unknown unknown");
  metrics.Retain({"digits@2"}, now + 3h);
  EXPECT_EQ(Versions(metrics, "denoised_images_total"), "digits 2, unknown unknown");
  // What has no version goes with the last of them.
  EXPECT_EQ(Versions(metrics, "denoised_client_images_total"), "digits , unknown ");
  metrics.ImageDone("faces@1", "anonymous");
  metrics.Retain({"faces@1"}, now + 4h);
  EXPECT_EQ(Versions(metrics, "denoised_client_images_total"), "faces , unknown ");
  metrics.ImageDone("digits@3", "anonymous");
  EXPECT_EQ(Versions(metrics, "denoised_client_images_total"), "digits , faces , unknown ");
}

}  // namespace
}  // namespace denoised
