// SPDX-License-Identifier: Apache-2.0
#include "server/config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "tests/io/temporary_directory.h"

namespace denoised {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class ConfigTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* file : {"b-model/config.json", "a-model/config.json"}) {
      directory_.Write(file, "{}");
    }
    std::filesystem::create_directories(directory_ / "not-a-model");
  }

  static absl::StatusOr<CommandLine> Parse(const std::vector<std::string>& flags) {
    std::vector<const char*> argv = {"denoised"};
    for (const std::string& flag : flags) argv.push_back(flag.c_str());
    return ParseCommandLine(static_cast<int>(argv.size()), argv.data());
  }

  /// The message of the error that `flags`, beside a good model, must cause.
  std::string Error(std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"--model", "m=" + Path("a-model")});
    const auto line = Parse(flags);
    return line.ok() ? "accepted" : std::string(line.status().message());
  }

  std::string Path(const std::string& name) const { return directory_ / name; }
  std::string Write(const std::string& text) const { return directory_.Write("config.json", text); }

  const TemporaryDirectory directory_;
};

TEST_F(ConfigTest, DefaultsAreSafe) {
  const auto line = Parse({"--model", "digits=" + Path("a-model")});
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_EQ(line->config.listen, "127.0.0.1:50051");
  EXPECT_EQ(line->config.metrics_listen, "127.0.0.1:9090");
  EXPECT_EQ(line->config.limits.max_request_bytes, 64 << 20);
  ASSERT_EQ(line->config.models.size(), 1u);
  EXPECT_EQ(line->config.models[0].name, "digits");
  EXPECT_EQ(line->config.models[0].directory, Path("a-model"));
  EXPECT_FALSE(line->print);
}

TEST_F(ConfigTest, ReadsEveryKindOfFlag) {
  const auto line = Parse({"--model", "x=" + Path("a-model"),
                           "--model", "y=" + Path("b-model"),
                           "--fp32",  "--device",
                           "cpu",     "--max-rows",
                           "8",       "--batching",
                           "request", "--priority-weights",
                           "9",       "3",
                           "0.5",     "--log-format",
                           "json",    "--log-level",
                           "debug",   "--grace-seconds",
                           "1.5",     "--metrics-listen",
                           "",        "--check"});
  ASSERT_TRUE(line.ok()) << line.status().message();
  const Config& config = line->config;
  EXPECT_EQ(config.models[1].name, "y");
  EXPECT_TRUE(config.engine.fp32);
  EXPECT_EQ(config.engine.device, "cpu");
  EXPECT_EQ(config.engine.max_rows, 8);
  EXPECT_EQ(config.engine.batching, Batching::kRequest);
  EXPECT_EQ(config.engine.priority_weights, (std::array<double, kPriorities>{9, 3, 0.5}));
  EXPECT_EQ(config.log_format, log::Format::kJson);
  EXPECT_EQ(config.log_level, log::Level::kDebug);
  EXPECT_EQ(config.grace.count(), 1500);
  EXPECT_EQ(config.metrics_listen, "");
  EXPECT_TRUE(config.check);
}

TEST_F(ConfigTest, AFlagWithNothingBehindItsEqualsSignIsEmpty) {
  const auto line = Parse(
      {"--model", "m=" + Path("a-model"), "--metrics-listen=", "--max-rows=4", "--state-dir="});
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_EQ(line->config.metrics_listen, "");
  EXPECT_EQ(line->config.engine.max_rows, 4);
  EXPECT_EQ(line->config.state_dir, "");
}

TEST_F(ConfigTest, AValueThatLooksLikeAnEmptyFlagIsAValue) {
  EXPECT_THAT(Error({"--model", "--state-dir="}),
              HasSubstr("--model --state-dir: \"\" is not a directory"));
  const auto line = Parse({"--model", "m=" + Path("a-model"), "--fp32", "--state-dir="});
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_EQ(line->config.state_dir, "");
}

TEST_F(ConfigTest, LoadsEachModelFolderByName) {
  const auto line = Parse({"--models", directory_.path()});
  ASSERT_TRUE(line.ok()) << line.status().message();
  ASSERT_EQ(line->config.models.size(), 2u);
  EXPECT_EQ(line->config.models[0].name, "a-model");
  EXPECT_EQ(line->config.models[1].name, "b-model");
  ASSERT_EQ(line->config.skipped_models.size(), 1u);
  EXPECT_EQ(line->config.skipped_models[0].directory, Path("not-a-model"));
  EXPECT_EQ(line->config.skipped_models[0].reason, "it holds no model_index.json or config.json");
  // What is hidden, such as .git, and files are nobody's model.
  std::filesystem::create_directories(directory_ / ".hidden");
  std::filesystem::create_symlink("/absent", directory_ / "link");
  const auto again = Parse({"--models", directory_.path()});
  ASSERT_EQ(again->config.skipped_models.size(), 2u);
  for (const SkippedFolder& folder : again->config.skipped_models) {
    if (folder.directory != Path("link")) continue;
    EXPECT_EQ(folder.reason, "it is a link to nothing");
  }
}

TEST_F(ConfigTest, ReadsJsonAndFlagsWin) {
  const std::string file = Write(
      "{\"listen\": \"127.0.0.1:0\", \"max-rows\": 4, \"fp32\": true,"
      " \"model\": {\"digits\": \"" +
      Path("a-model") + "\"}}");
  const auto line = Parse({"--config", file, "--max-rows", "2"});
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_EQ(line->config.listen, "127.0.0.1:0");
  EXPECT_EQ(line->config.engine.max_rows, 2);
  EXPECT_TRUE(line->config.engine.fp32);
  ASSERT_EQ(line->config.models.size(), 1u);
  EXPECT_EQ(line->config.models[0].name, "digits");
}

/// A variable of the environment for one test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }

 private:
  const char* const name_;
};

TEST_F(ConfigTest, FlagsWinOverTheEnvironmentAndThatOverTheFile) {
  const std::string file = Write("{\"max-rows\": 4, \"max-count\": 5, \"max-slots\": 6}");
  const Variable rows("DENOISED_MAX_ROWS", "8"), count("DENOISED_MAX_COUNT", "9");
  const auto line = Parse({"--model", "m=" + Path("a-model"), "--config", file, "--max-rows", "2"});
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_EQ(line->config.engine.max_rows, 2);
  EXPECT_EQ(line->config.engine.max_count, 9);
  EXPECT_EQ(line->config.engine.max_slots, 6);
  const Variable wrong("DENOISED_MAX_STEPS", "many");
  EXPECT_THAT(Error({}), HasSubstr("many"));
}

TEST_F(ConfigTest, ReadsLimits) {
  const auto line = Parse({"--model",
                           "m=" + Path("a-model"),
                           "--max-steps",
                           "50",
                           "--max-image-pixels",
                           "65536",
                           "--max-tensor-bytes",
                           "1048576",
                           "--max-decoding-bytes",
                           "2097152",
                           "--max-reply-bytes",
                           "67108864",
                           "--max-previews-per-second",
                           "2.5",
                           "--max-connections",
                           "7",
                           "--max-streams-per-connection",
                           "8",
                           "--max-streams-per-client",
                           "9",
                           "--max-queued-requests-per-client",
                           "10",
                           "--max-buffered-bytes",
                           "33554432",
                           "--max-connection-idle-seconds",
                           "1.5",
                           "--handshake-timeout-seconds",
                           "2.5"});
  ASSERT_TRUE(line.ok()) << line.status().message();
  const Config& config = line->config;
  EXPECT_EQ(config.limits.max_steps, 50);
  EXPECT_EQ(config.limits.max_image_pixels, 65536);
  EXPECT_EQ(config.limits.max_tensor_bytes, 1048576);
  EXPECT_EQ(config.max_decoding_bytes, 2097152);
  EXPECT_EQ(config.limits.max_reply_bytes, 33554432) << "gRPC holds no more";
  EXPECT_EQ(config.limits.max_previews_per_second, 2.5);
  EXPECT_EQ(config.connections.max_connections, 7);
  EXPECT_EQ(config.connections.max_streams, 8);
  EXPECT_EQ(config.connections.max_streams_per_client, 9);
  EXPECT_EQ(config.connections.max_queued_requests_per_client, 10);
  EXPECT_EQ(config.connections.max_buffered_bytes, 33554432);
  EXPECT_EQ(config.connections.max_idle.count(), 1500);
  EXPECT_EQ(config.connections.handshake.count(), 2500);
}

TEST_F(ConfigTest, OffersTheWorldNothingByOversight) {
  const auto parse = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"--model", "m=" + Path("a-model")});
    auto line = Parse(flags);
    EXPECT_TRUE(line.ok()) << line.status().message();
    return line.ok() ? line->config : Config{};
  };
  const std::vector<std::string> tls = {"--tls-cert", "c", "--tls-key", "k", "--clients", "f"};
  EXPECT_TRUE(parse({}).admin);
  EXPECT_TRUE(parse({}).reflection);
  for (const char* loopback : {"127.0.0.1:0", "127.1.2.3:0", "localhost:0", "[::1]:0"}) {
    EXPECT_TRUE(parse({"--listen", loopback}).admin) << loopback;
  }
  for (const char* open :
       {"0.0.0.0:0", "[::]:0", "10.0.0.1:0", "example.org:0", "127.0.0.1.org:0"}) {
    EXPECT_FALSE(parse({"--listen", open}).admin) << open;
    EXPECT_FALSE(parse({"--listen", open}).reflection) << open;
    EXPECT_THAT(Error({"--listen", open, "--admin", "on"}), HasSubstr("--clients")) << open;
  }
  EXPECT_FALSE(parse({"--admin", "off"}).admin);
  EXPECT_FALSE(EverybodyIsAdmin(parse({"--admin", "off"}))) << "a proxy may be on this machine";
  EXPECT_TRUE(EverybodyIsAdmin(parse({})));
  const std::vector<std::string> mutual = {"--tls-cert",      "c", "--tls-key", "k",
                                           "--tls-client-ca", "ca"};
  EXPECT_FALSE(parse(mutual).admin) << "whoever has a certificate is no admin for that";
  EXPECT_FALSE(EverybodyIsAdmin(parse(tls))) << "the file says who is";
  EXPECT_TRUE(parse(tls).admin);
  EXPECT_THAT(Error({"--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "ca", "--admin=on"}),
              HasSubstr("name them in --clients with \"admin\": true"));
  EXPECT_FALSE(parse({"--reflection", "off"}).reflection);
  EXPECT_TRUE(parse({"--listen", "0.0.0.0:0", "--reflection", "on"}).reflection);
  for (const char* open : {"0.0.0.0:0", "[::]:0"}) {
    EXPECT_FALSE(parse({"--http-listen", open}).admin) << "the HTTP port takes the same calls";
    EXPECT_THAT(Error({"--http-listen", open, "--admin", "on"}), HasSubstr(open));
  }
  EXPECT_TRUE(parse({"--http-listen", ""}).admin);
  std::vector<std::string> flags = {"--listen", "0.0.0.0:0"};
  flags.insert(flags.end(), tls.begin(), tls.end());
  EXPECT_TRUE(parse(flags).admin);
  EXPECT_FALSE(parse(flags).reflection);
}

TEST_F(ConfigTest, ModelRootsAndStateDirectory) {
  const auto line = Parse({"--model", "m=" + Path("a-model"), "--model-roots",
                           Path("b-model") + "," + directory_.path(), "--state-dir", "/var/x"});
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_THAT(line->config.model_roots, ::testing::ElementsAre(Path("b-model"), directory_.path()));
  EXPECT_EQ(line->config.state_dir, "/var/x");
  EXPECT_THAT(Error({"--model-roots", Path("absent")}), HasSubstr("--model-roots: \""));
}

TEST_F(ConfigTest, LoginNeedsEncryption) {
  EXPECT_THAT(Error({"--clients", "f"}), HasSubstr("--clients needs TLS"));
  EXPECT_THAT(Error({"--clients", "f", "--allow-plaintext-tokens", "--listen", "0.0.0.0:1"}),
              HasSubstr("listens on 0.0.0.0:1"));
  EXPECT_THAT(
      Error({"--clients", "f", "--allow-plaintext-tokens", "--tls-cert", "c", "--tls-key", "k"}),
      HasSubstr("with TLS; leave it out"));
  EXPECT_THAT(Error({"--clients", "f", "--allow-plaintext-tokens", "--http-listen", "0.0.0.0:2"}),
              HasSubstr("listens on 0.0.0.0:2"));
  EXPECT_TRUE(Parse({"--model", "m=" + Path("a-model"), "--clients", "f",
                     "--allow-plaintext-tokens", "--listen", "127.0.0.1:1"})
                  .ok());
  EXPECT_THAT(Error({"--allow-plaintext-tokens"}), HasSubstr("without --clients"));
  EXPECT_THAT(Error({"--tls-client-ca", "f"}), HasSubstr("--tls-client-ca needs TLS"));
  EXPECT_THAT(Error({"--tls-cert", "f"}), HasSubstr("--tls-cert is given without --tls-key"));
  EXPECT_THAT(Error({"--tls-key", "f"}), HasSubstr("--tls-key is given without --tls-cert"));
  EXPECT_THAT(Error({"--admin", "yes"}), HasSubstr("--admin"));
}

TEST_F(ConfigTest, MakesTokens) {
  const auto line = Parse({"--make-token", "studio"});
  ASSERT_TRUE(line.ok() && line->print);
  EXPECT_THAT(*line->print, HasSubstr("\"studio\": {\"token_sha256\": [\""));
  EXPECT_THAT(Error({"--make-token", "a b"}), HasSubstr("--make-token"));
  EXPECT_THAT(Error({"--make-token", ""}), HasSubstr("--make-token"));
  EXPECT_THAT(Error({"--make-token", "anonymous"}), HasSubstr("choose another"))
      << "the file of clients cannot have it";
}

TEST_F(ConfigTest, RefusesBadJson) {
  EXPECT_THAT(Error({"--config", Write("{\"listen\": ")}), HasSubstr("not valid JSON"));
  EXPECT_THAT(Error({"--config", Write("{\"fp32\": true, \"fp32\": false}")}),
              HasSubstr("\"fp32\" twice"));
  EXPECT_THAT(Error({"--config", Write("[1]")}), HasSubstr("JSON object"));
  EXPECT_THAT(Error({"--config", Write("{\"listne\": \"127.0.0.1:0\"}")}),
              AllOf(HasSubstr("config.json: unknown key \"listne\""), Not(HasSubstr("INI"))));
  EXPECT_THAT(Error({"--config", Write("{\"listen\": {\"a\": 1}}")}), HasSubstr("listen"));
  EXPECT_THAT(Error({"--config", Write("{\"max-rows\": \"many\"}")}), HasSubstr("max-rows"));
  EXPECT_THAT(Error({"--config", Path("absent.json")}), HasSubstr("absent.json"));
}

TEST_F(ConfigTest, NamesFlagValueAndRemedy) {
  EXPECT_THAT(Error({"--listen", "nowhere"}), HasSubstr("--listen: \"nowhere\""));
  EXPECT_THAT(Error({"--listen", "127.0.0.1:70000"}), HasSubstr("65535"));
  EXPECT_THAT(Error({"--metrics-listen", ":"}), HasSubstr("--metrics-listen"));
  EXPECT_THAT(Error({"--http-listen", "8080"}), HasSubstr("--http-listen: \"8080\""));
  for (const char* origin : {"studio.example.org", "https://", "https://a/b", "ftp://a", "*"}) {
    EXPECT_THAT(Error({"--http-origins", origin}), HasSubstr("is no origin")) << origin;
  }
  for (const auto& [origin, sent] :
       {std::pair{"https://Studio.example.org", "https://studio.example.org"},
        {"HTTP://localhost:5173", "http://localhost:5173"},
        {"https://studio.example.org:443", "https://studio.example.org"},
        {"http://[::1]:80", "http://[::1]"}}) {
    EXPECT_THAT(Error({"--http-origins", origin}), HasSubstr("as \"" + std::string(sent) + "\""));
  }
  EXPECT_THAT(Error({"--http-origins", "https://studio.example.org:80", "--max-rows", "-1"}),
              ::testing::Not(HasSubstr("--http-origins")));
  EXPECT_THAT(Error({"--max-rows", "-1"}), HasSubstr("--max-rows"));
  EXPECT_THAT(Error({"--max-rows", "x"}), HasSubstr("--max-rows"));
  EXPECT_THAT(Error({"--max-rows", "1"}),
              HasSubstr("--max-rows: 1 is neither 0 nor a number from 2 to 1024"));
  EXPECT_THAT(Error({"--devices", "0,1,0"}), HasSubstr("--devices: 0 is given twice"));
  EXPECT_THAT(Error({"--batching", "batch"}), HasSubstr("--batching"));
  EXPECT_THAT(Error({"--priority-weights", "16", "0", "1"}), HasSubstr("--priority-weights"));
  for (const char* given : {"16,4", "16,4,1,1"}) {
    EXPECT_THAT(Error({"--priority-weights", given}),
                AllOf(HasSubstr(std::string("--priority-weights: ") + given),
                      HasSubstr("give 3, for interactive, normal and batch requests: 16,4,1")));
  }
  EXPECT_THAT(Error({"--watchdog-seconds", "-1"}), HasSubstr("--watchdog-seconds"));
  EXPECT_THAT(Error({"--max-request-bytes", "3000000000"}), HasSubstr("--max-request-bytes"));
  EXPECT_THAT(Error({"--grace-seconds", "nan"}), HasSubstr("--grace-seconds"));
  EXPECT_THAT(Error({"--log-format", "xml"}), HasSubstr("--log-format"));
  const auto expect_begin = [this](const std::vector<std::string>& flags,
                                   const std::string& begin) {
    EXPECT_THAT(Error(flags), StartsWith(begin + " (see denoised --help)"));
  };
  expect_begin({"--unknown"}, "--unknown is no option");
  expect_begin({"--max_rows", "4"}, "--max_rows is no option; did you mean --max-rows?");
  expect_begin({"--max-steps", "--max-rows"},
               "--max-steps: --max-rows is not a whole number from "
               "0 to 100000; use one");
  expect_begin({"--max-rows"}, "--max-rows has no value; give one");
  expect_begin({"--max-rows", "4", "serve"}, "\"serve\" is one argument too many; leave it out");
  expect_begin({"--max-steps", "1.5"},
               "--max-steps: 1.5 is not a whole number from 0 to 100000; use one");
  expect_begin({"--max-count=4", "--max-count=5"}, "--max-count is given 2 times; give it once");
  expect_begin({"--grace-seconds", "0x10"}, "--grace-seconds: 0x10 is not decimal; write 16");
  expect_begin({"--device", "gpu"}, "--device: \"gpu\" is unknown; use auto, cpu or cuda");
  expect_begin({"--fp32=maybe"}, "--fp32: maybe is neither true nor false; use one of them");
  expect_begin({"--config", "/absent"},
               "--config: /absent cannot be read; name a file that is there");
  const std::string config = Write(R"({"check": true})");
  expect_begin({"--config", config},
               "--config: " + config + ": \"check\" is for the command line alone; remove it");
  EXPECT_THAT(Error({"--model", "digits"}), HasSubstr("name=directory"));
  EXPECT_THAT(Error({"--model", "a b=" + Path("a-model")}), HasSubstr("\"a b\""));
  EXPECT_THAT(Error({"--model", "n=/absent"}), HasSubstr("/absent"));
  EXPECT_THAT(Error({"--model", "m=" + Path("b-model")}), HasSubstr("two models are named \"m\""));
  EXPECT_THAT(Error({"--models", "/absent"}), HasSubstr("--models"));
  EXPECT_THAT(Error({"--models", Path("not-a-model")}), HasSubstr("model_index.json"));
  const std::string all = Error({"--listen", "nowhere", "--model", "n=/absent", "--clients", "f"});
  for (const char* part :
       {"--listen: \"nowhere\"", "\n--model n: \"/absent\"", "--clients needs"}) {
    EXPECT_THAT(all, HasSubstr(part));
  }
  for (const std::vector<std::string>& twice : std::vector<std::vector<std::string>>{
           {"--precision", "x", "--precision", "x"}, {"--http-origins", "x,x"}})
    EXPECT_THAT(Error(twice), ::testing::Not(HasSubstr("\n")));
  const auto none = Parse({});
  ASSERT_FALSE(none.ok());
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("--model"));
}

/// CLI11 reads 0100 as 64.
TEST_F(ConfigTest, IntegersAreDecimal) {
  EXPECT_THAT(
      Error({"--max-count", "0100"}),
      StartsWith("--max-count: 0100 begins with a zero, which could mean octal; write 100"));
  EXPECT_THAT(Error({"--max-count", "-0100"}), HasSubstr("; write -100"));
  EXPECT_THAT(Error({"--max-count", " 08"}), HasSubstr("begins with a zero"));
  EXPECT_THAT(Error({"--max-rows", "00"}), HasSubstr("; write 0 (see"));
  EXPECT_THAT(Error({"--max-steps", "0x10"}),
              StartsWith("--max-steps: 0x10 is not decimal; write 16"));
  EXPECT_THAT(Error({"--max-queued-bytes", "0X100000"}), HasSubstr("; write 1048576"));
  EXPECT_THAT(Error({"--max-steps", "0b11"}),
              HasSubstr("--max-steps: 0b11 is not decimal; write 3"));
  EXPECT_THAT(Error({"--devices", "0,01"}), HasSubstr("--devices: 01 begins with a zero"));
  EXPECT_THAT(Error({"--config", Write("{\"max-count\": \"010\"}")}),
              HasSubstr("--max-count: 010 begins with a zero"));
  {
    const Variable count("DENOISED_MAX_COUNT", "010");
    EXPECT_THAT(Error({}), HasSubstr("--max-count: 010 begins with a zero"));
  }
  EXPECT_EQ(Error({"--max-rows", "0", "--devices", "0,10", "--grace-seconds", "00.5"}), "accepted");
  EXPECT_THAT(Error({"--max-rows", "0x"}), HasSubstr("--max-rows: "));
}

/// As Helm and jq write large numbers.
TEST_F(ConfigTest, WholeNumbersOfAFileMayBeInFloatNotation) {
  const auto line = Parse({"--model", "m=" + Path("a-model"), "--config",
                           Write("{\"max-queued-bytes\": 1.073741824e+09, \"max-rows\": 8.0,"
                                 " \"devices\": [0.0, 1.0], \"grace-seconds\": 2.0}")});
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_EQ(line->config.engine.max_queued_bytes, size_t{1} << 30);
  EXPECT_EQ(line->config.engine.max_rows, 8);
  EXPECT_EQ(line->config.engine.devices, (std::vector<int>{0, 1}));
  EXPECT_EQ(line->config.grace.count(), 2000);
  for (const char* value : {"8.5", "1e300", "-8.0"}) {
    EXPECT_THAT(Error({"--config", Write(fmt::format("{{\"max-rows\": {}}}", value))}),
                HasSubstr("--max-rows"))
        << value;
  }
}

/// A limit that every evaluation exceeds would end the process at the first load.
TEST_F(ConfigTest, TheWatchdogIsOffOrWaitsASecond) {
  for (const char* bad : {"1e-300", "0.99", "86401", "soon"}) {
    EXPECT_THAT(Error({"--watchdog-seconds", bad}),
                HasSubstr(fmt::format("--watchdog-seconds: {} is neither 0 nor a number from 1 to "
                                      "86400",
                                      bad)));
  }
  EXPECT_THAT(Error({"--watchdog-seconds", "nan"}),
              HasSubstr("--watchdog-seconds: nan is not a finite number; use one"));
  for (const char* good : {"0", "1", "1.5", "86400"}) {
    EXPECT_EQ(Error({"--watchdog-seconds", good}), "accepted") << good;
  }
  const auto help = Parse({"--help"});
  ASSERT_TRUE(help.ok() && help->print);
  EXPECT_THAT(*help->print, HasSubstr("SECONDS 0 or [1 - 86400]"));
}

TEST_F(ConfigTest, PrintsWhatConfigReads) {
  const auto print = [](std::vector<std::string> flags) {
    flags.push_back("--print-config");
    const auto line = Parse(flags);
    EXPECT_TRUE(line.ok()) << line.status().message();
    return line.ok() ? line->print.value_or("nothing") : "";
  };
  const std::string defaults = print({});
  EXPECT_EQ(print({"--config", Write(defaults)}), defaults);

  // Of each source, and of each kind: text, empty text, text that looks like a number, numbers,
  // flags, lists, names of values.
  const std::string file = Write(
      "{\"max-rows\": 4, \"max-count\": 5, \"max-slots\": 6, \"fp32\": true,"
      " \"priority-weights\": [9, 3, 0.5], \"clients\": \"\"}");
  const Variable rows("DENOISED_MAX_ROWS", "8"), count("DENOISED_MAX_COUNT", "9");
  const std::vector<std::string> flags = {"--config",         file,    "--max-rows",      "2",
                                          "--metrics-listen", "",      "--model",         "m=b",
                                          "--model",          "a=b",   "--tls-cert",      "1e3",
                                          "--tls-key",        "key",   "--batching",      "request",
                                          "--log-level",      "debug", "--grace-seconds", "0.25"};
  const auto printed = nlohmann::json::parse(print(flags));
  const nlohmann::json expected = {
      {"max-rows", 2},        {"max-count", 9},           {"max-slots", 6},
      {"fp32", true},         {"generic-kernels", false}, {"priority-weights", {9, 3, 0.5}},
      {"clients", ""},        {"metrics-listen", ""},     {"model", {"m=b", "a=b"}},
      {"tls-cert", "1e3"},    {"grace-seconds", 0.25},    {"batching", "request"},
      {"log-level", "debug"}, {"log-format", "text"},     {"listen", "127.0.0.1:50051"}};
  for (const auto& [name, value] : expected.items())
    EXPECT_EQ(printed.value(name, nlohmann::json()), value) << name;
  for (const char* action :
       {"help", "version", "config", "check", "print-config", "make-token", "calibrate"}) {
    EXPECT_FALSE(printed.contains(action)) << action;
  }

  unsetenv("DENOISED_MAX_ROWS");
  unsetenv("DENOISED_MAX_COUNT");
  EXPECT_EQ(nlohmann::json::parse(print({"--config", Write(printed.dump())})), printed);
  EXPECT_NE(nlohmann::json::parse(print({})), printed);
}

/// What a start refuses later would be found at the next restart.
TEST_F(ConfigTest, PrintsOnlyWhatAStartAccepts) {
  const std::vector<std::vector<std::string>> bad = {{"--max-rows", "1"},
                                                     {"--max-count", "65537"},
                                                     {"--devices", "0,1,0"},
                                                     {"--listen", "nowhere"},
                                                     {"--metrics-listen", "8080"},
                                                     {"--http-origins", "studio.example.org"},
                                                     {"--tls-cert", "c"},
                                                     {"--clients", "f"},
                                                     {"--listen", "0.0.0.0:0", "--admin", "on"},
                                                     {"--model", "digits"},
                                                     {"--model", "a b=x"},
                                                     {"--model", "m=x"},  // beside that of Error()
                                                     {"--precision", "int4"},
                                                     {"--precision", "cats=fp8"}};
  for (std::vector<std::string> flags : bad) {
    const std::string error = Error(flags), what = ::testing::PrintToString(flags);
    EXPECT_NE(error, "accepted") << what;
    flags.emplace_back("--print-config");
    // A start also says which directories are missing.
    EXPECT_THAT(error, HasSubstr(Error(flags))) << what;
  }
  // The models may be on another machine, which has more of them.
  for (const std::vector<std::string>& good :
       {std::vector<std::string>{"--precision", "cats=fp8"},
        {"--models", "/absent", "--precision", "cats=fp8"},
        {"--model", "cats=/absent", "--precision", "cats=fp8"},
        {"--model-roots", "/absent"}}) {
    std::vector<std::string> flags = good;
    flags.emplace_back("--print-config");
    const auto line = Parse(flags);
    EXPECT_TRUE(line.ok() && line->print) << line.status().message();
  }
}

TEST_F(ConfigTest, EverySettingIsPrinted) {
  const auto help = Parse({"--help"}), settings = Parse({"--print-config"});
  ASSERT_TRUE(help.ok() && help->print && settings.ok() && settings->print);
  const auto printed = nlohmann::json::parse(*settings->print);
  // "  --max-rows INT:…"; what a file cannot set, sets in another way, or is an empty list.
  const std::set<std::string> others = {"help",         "version",    "config",      "check",
                                        "print-config", "make-token", "calibrate",   "model",
                                        "model-roots",  "precision",  "http-origins"};
  std::istringstream lines(*help->print);
  int found = 0;
  for (std::string line; std::getline(lines, line);) {
    const size_t begin = line.find("--");
    if (begin == std::string::npos || line.find_first_not_of(' ') > begin || begin > 5) continue;
    const std::string name = line.substr(begin + 2, line.find_first_of(" ,", begin) - begin - 2);
    EXPECT_EQ(printed.contains(name), others.count(name) == 0) << line;
    ++found;
  }
  EXPECT_GT(found, 50);
}

TEST_F(ConfigTest, ListsComeFromTheEnvironmentToo) {
  const Variable weights("DENOISED_PRIORITY_WEIGHTS", "9,3,0.5");
  const auto line = Parse({"--model", "m=" + Path("a-model")});
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_EQ(line->config.engine.priority_weights, (std::array<double, kPriorities>{9, 3, 0.5}));
}

TEST_F(ConfigTest, NonfiniteImagesAreDeliveredOnlyOnRequest) {
  const auto line = Parse({"--model", "m=" + Path("a-model")});
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_FALSE(line->config.engine.allow_nonfinite);
  const auto allowed = Parse({"--model", "m=" + Path("a-model"), "--allow-nonfinite"});
  ASSERT_TRUE(allowed.ok()) << allowed.status().message();
  EXPECT_TRUE(allowed->config.engine.allow_nonfinite);
}

TEST_F(ConfigTest, PrecisionOfAllModelsOrOfOne) {
  std::vector<std::string> flags = {"--model", "x=" + Path("a-model"), "--model",
                                    "y=" + Path("b-model")};
  const auto plain = Parse(flags);
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->config.engine.precision, std::nullopt);
  EXPECT_EQ(plain->config.models[0].precision, std::nullopt);
  flags.insert(flags.end(), {"--precision", "fp8", "--precision", "y=default", "--calibrations",
                             "/var/lib/scales"});
  const auto line = Parse(flags);
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.engine.precision, Precision::kFp8);
  EXPECT_EQ(line->config.models[0].precision, std::nullopt);
  EXPECT_EQ(line->config.models[1].precision, Precision::kDefault);
  EXPECT_EQ(line->config.engine.calibrations, "/var/lib/scales");

  const auto file = Parse({"--config", Write(R"({"model": {"x": ")" + Path("a-model") +
                                             R"("}, "precision": {"x": "fp8"}})")});
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->config.models[0].precision, Precision::kFp8);

  EXPECT_THAT(Error({"--precision", "int4"}), AllOf(HasSubstr("--precision"), HasSubstr("int4"),
                                                    HasSubstr("\"default\" or \"fp8\"")));
  EXPECT_THAT(Error({"--precision", "m=bf16"}), HasSubstr("bf16"));
  EXPECT_THAT(Error({"--precision", "cats=fp8"}), HasSubstr("no model \"cats\""));
}

TEST_F(ConfigTest, CalibratingNeedsNoModelToServe) {
  const auto line = Parse({"--calibrate", Path("a-model")});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.calibrate, Path("a-model"));
  EXPECT_FALSE(Parse({}).ok());
  EXPECT_THAT(std::string(Parse({"--calibrate", ""}).status().message()), HasSubstr("--calibrate"));
}

TEST_F(ConfigTest, MeasuredKernelsAreKeptInTheCacheOfTheUser) {
  const auto engine = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"--model", "m=" + Path("a-model")});
    const auto line = Parse(flags);
    EXPECT_TRUE(line.ok()) << line.status().message();
    return line.ok() ? line->config.engine : EngineOptions();
  };
  const Variable home("HOME", "/home/me"), cache("XDG_CACHE_HOME", "/caches");
  EXPECT_EQ(engine({}).cpu_dtype, DType::kF32);
  EXPECT_EQ(engine({"--cpu-dtype", "bf16"}).cpu_dtype, DType::kBF16);
  EXPECT_TRUE(engine({}).autotune);
  EXPECT_FALSE(engine({"--autotune", "off"}).autotune);
  EXPECT_EQ(engine({}).autotune_cache, "/caches/denoised");
  EXPECT_EQ(engine({"--autotune-cache", "/var/cache/mine"}).autotune_cache, "/var/cache/mine");
  EXPECT_EQ(engine({"--autotune-cache", ""}).autotune_cache, "");
  setenv("XDG_CACHE_HOME", "relative", 1);
  EXPECT_EQ(engine({}).autotune_cache, "/home/me/.cache/denoised");
  setenv("XDG_CACHE_HOME", "", 1);
  EXPECT_EQ(engine({}).autotune_cache, "/home/me/.cache/denoised");
  setenv("HOME", "", 1);
  EXPECT_EQ(engine({}).autotune_cache, "");
}

TEST_F(ConfigTest, DevicesAreNumbered) {
  const auto devices = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--model", "m=" + Path("a-model")});
    const auto line = Parse(arguments);
    EXPECT_TRUE(line.ok()) << line.status().message();
    return line->config.engine.devices;
  };
  using Numbers = std::vector<int>;
  EXPECT_EQ(devices({}), Numbers({0}));
  EXPECT_EQ(devices({"--devices=0,1"}), Numbers({0, 1}));
  EXPECT_EQ(devices({"--config", Write("{\"devices\": [2, 3]}")}), Numbers({2, 3}));
  EXPECT_EQ(devices({"--config", Write("{\"devices\": 3}")}), Numbers({3}));
  EXPECT_THAT(Error({"--devices", "-1"}), HasSubstr("--devices"));
  EXPECT_THAT(Error({"--devices", "0,x"}), HasSubstr("--devices"));
  EXPECT_THAT(Error({"--device", "cuda:1"}), HasSubstr("--device"));
  const auto printed = Parse({"--devices", "1,0", "--print-config"});
  ASSERT_TRUE(printed.ok()) << printed.status().message();
  EXPECT_EQ(nlohmann::json::parse(*printed->print)["devices"], nlohmann::json({1, 0}));
  const Variable variable("DENOISED_DEVICES", "0,2");
  EXPECT_EQ(devices({}), Numbers({0, 2}));
}

TEST_F(ConfigTest, EmptyVariablesAreNone) {
  const Variable rows("DENOISED_MAX_ROWS", "");
  const auto line =
      Parse({"--model", "m=" + Path("a-model"), "--config", Write("{\"max-rows\": 4}")});
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_EQ(line->config.engine.max_rows, 4);
}

TEST_F(ConfigTest, TheFileCanBeNamedByTheEnvironment) {
  const Variable file("DENOISED_CONFIG", Write("{\"max-rows\": 4}").c_str());
  const std::vector<std::string> model = {"--model", "m=" + Path("a-model")};
  const auto line = Parse(model);
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_EQ(line->config.engine.max_rows, 4);

  const std::string other = directory_.Write("other.json", "{\"max-rows\": 6}");
  const auto given = Parse({model[0], model[1], "--config=" + other});
  ASSERT_TRUE(given.ok()) << given.status().message();
  EXPECT_EQ(given->config.engine.max_rows, 6) << "flags win";

  const Variable absent("DENOISED_CONFIG", "absent.json");
  EXPECT_THAT(Error(model), HasSubstr("absent.json"));
}

TEST_F(ConfigTest, WhatIsNoSettingIsNotInTheEnvironment) {
  const Variable version("DENOISED_VERSION", "1"), help("DENOISED_HELP", "1"),
      check("DENOISED_CHECK", "1");
  const auto line = Parse({"--model", "m=" + Path("a-model")});
  ASSERT_TRUE(line.ok()) << line.status().message();
  EXPECT_FALSE(line->print || line->config.check);
}

TEST_F(ConfigTest, PrintsHelpAndVersion) {
  const auto help = Parse({"--help"});
  ASSERT_TRUE(help.ok() && help->print);
  EXPECT_THAT(*help->print, HasSubstr("--max-queued-images"));
  const auto version = Parse({"--version"});
  ASSERT_TRUE(version.ok() && version->print);
  EXPECT_THAT(*version->print, HasSubstr("denoised 0."));
}

}  // namespace
}  // namespace denoised
