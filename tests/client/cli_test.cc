// SPDX-License-Identifier: Apache-2.0
// The denoise program itself, against the fake service.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "command/codec_files.h"
#include "command/files.h"
#include "command/npy.h"
#include "tests/client/fake_service.h"
#include "tests/client/process.h"
#include "tests/eventually.h"
#include "tests/io/temporary_directory.h"
#include "tests/tls/certificates.h"
#include "tests/training/free_port.h"

namespace denoised::command {
namespace {

using client::FakeServer;
using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class CliTest : public testing::Test {
 protected:
  std::string Path(const std::string& name) const { return folder_ / name; }
  std::string Read(const std::string& name) const {
    const auto bytes = ReadFile(Path(name));
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    return bytes.value_or("");
  }
  std::vector<std::string> Command(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), {DENOISE_BINARY, "--server", server_.address()});
    return arguments;
  }
  ProcessResult Run(std::vector<std::string> arguments) const {
    return RunProcess(Command(std::move(arguments)));
  }
  static std::vector<nlohmann::json> Lines(const std::string& text) {
    std::vector<nlohmann::json> lines;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) {
      lines.push_back(nlohmann::json::parse(line));
    }
    return lines;
  }

  FakeServer server_;
  TemporaryDirectory folder_;
};

TEST_F(CliTest, SeveralSeedsAreOneForEachImage) {
  const auto result = Run({"generate", "-l", "3", "--seed", "9,2", "-o", Path("{seed}.png")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, StartsWith(Path("9.png") + "  seed 9  label 3\n" + Path("2.png") +
                                     "  seed 2  label 3\n"));
  const auto refused = Run({"generate", "-n", "3", "--seed", "9,2", "-o", Path("x-{index}.png")});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("--seed names 2 seeds for 3 images"));
  for (const char* command : {"generate", "bench"}) {
    for (const char* seed : {"-1", "18446744073709551616", "1.5"}) {
      const auto again = Run({command, std::string("--seed=") + seed});
      EXPECT_EQ(again.exit_code, 2) << seed;
      EXPECT_THAT(again.err, HasSubstr(std::string(seed) + " is not a whole number from 0 to "));
    }
  }
  EXPECT_EQ(server_.requests().size(), 1u);
}

TEST_F(CliTest, APromptInBracketsIsOne) {
  const std::vector<std::string> prompts = {"[a,b]", "[]", "[\"x, y\"]", "[[a]]", "a [b]"};
  std::vector<std::string> arguments = {"generate", "--negative", "[n,m]", "-o", Path("x.png")};
  arguments.insert(arguments.end(), prompts.begin(), prompts.end());
  const auto result = Run(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  ASSERT_EQ(server_.requests().size(), 1u);
  std::vector<std::string> sent;
  const v1::GenerationParams params = server_.requests()[0];
  for (const v1::Condition& condition : params.conditions()) {
    sent.push_back(condition.text());
    EXPECT_EQ(condition.negative_text(), "[n,m]");
  }
  EXPECT_EQ(sent, prompts);
  EXPECT_EQ(Run({"generate", "-o", Path("x.png"), "--", "[c,d]"}).exit_code, 0);
  EXPECT_EQ(server_.requests().at(1).conditions(0).text(), "[c,d]");
  EXPECT_THAT(Run({"generate", "a", "--", "[c,d]"}).err, StartsWith("\"[c,d]\" is one argument"));
}

TEST_F(CliTest, OptionsThatTakeListsLeaveThePromptAlone) {
  EXPECT_EQ(Run({"generate", "--seed", "1,2", "a", "b", "-o", Path("{seed}.png")}).exit_code, 0);
  const v1::GenerationParams prompts = server_.requests().at(0);
  ASSERT_EQ(prompts.conditions_size(), 2);
  EXPECT_EQ(prompts.conditions(0).text(), "a");
  EXPECT_EQ(prompts.conditions(1).text(), "b");
  EXPECT_EQ(prompts.seeds_size(), 2);
  EXPECT_EQ(Run({"generate", "-l", "3", "-l", "four,5", "-o", Path("x.png")}).exit_code, 0);
  EXPECT_EQ(server_.requests().at(1).conditions_size(), 3);
  EXPECT_THAT(Run({"generate", "-l", "3", "a"}).err, HasSubstr("PROMPT, --labels and --class"));
  EXPECT_THAT(Run({"generate", "--class-vectors", "1,2", "a"}).err, HasSubstr("PROMPT, --labels"));
}

TEST_F(CliTest, ImagesOfOneSeedGetFilesOfTheirOwn) {
  const auto same = Run({"generate", "-l", "3", "--seed", "9,9", "-o", Path("{seed}.png")});
  EXPECT_THAT(same.out, StartsWith(Path("9-0.png") + "  seed 9  label 3\n" + Path("9-1.png") +
                                   "  seed 9  label 3\n"));
}

TEST_F(CliTest, ImagesOfOneLabelGetFilesOfTheirOwn) {
  for (const std::vector<std::string>& labels :
       std::vector<std::vector<std::string>>{{"-l", "3", "-n", "2"}, {"-l", "3,3"}}) {
    std::vector<std::string> arguments = {"generate", "--seed", "9", "-o", Path("{label}.png")};
    arguments.insert(arguments.end(), labels.begin(), labels.end());
    EXPECT_THAT(Run(arguments).out,
                StartsWith(Path("3-0.png") + "  seed 9  label 3\n" + Path("3-1.png")));
  }
  // One that the server chooses is known to differ only then.
  EXPECT_THAT(Run({"generate", "-n", "2", "--seed", "9", "-o", Path("{label}.png")}).out,
              StartsWith(Path("0.png") + "  seed 9  label 0\n" + Path("1.png")));
}

TEST_F(CliTest, AFlagWithNothingBehindItsEqualsSignIsEmpty) {
  const auto result =
      Run({"generate", "--prompt-2", "y", "--negative=", "--out", Path("n.png"), "x", "--json="});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  ASSERT_EQ(server_.requests().size(), 1u);
  const auto conditions = server_.requests()[0].conditions();
  ASSERT_EQ(conditions.size(), 1);
  EXPECT_EQ(conditions[0].text(), "x");
  EXPECT_TRUE(conditions[0].has_negative_text());
  EXPECT_EQ(conditions[0].negative_text(), "");
  EXPECT_TRUE(std::filesystem::exists(Path("n.png")));
  // A value that is named as a command is.
  const auto help = Run({"--context", "jobs", "generate", "--negative=", "--help"});
  EXPECT_EQ(help.exit_code, 0) << help.err;
  EXPECT_THAT(help.out, HasSubstr("--negative"));
}

TEST_F(CliTest, DrawsFiles) {
  const auto result = Run({"generate", "-l", "three,4", "--seed", "42", "-o", Path("{label}.png")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, StartsWith(Path("3.png") + "  seed 42  label 3\n" + Path("4.png") +
                                     "  seed 43  label 4\n2 images in 0.5 s: digits"));
  EXPECT_THAT(result.out, Not(HasSubstr("\x1b"))) << "escape codes, but no terminal";
  EXPECT_EQ(result.err, "");
  const auto pixels = DecodePng(Read("4.png"));
  ASSERT_TRUE(pixels.ok()) << pixels.status();
  EXPECT_EQ(pixels->width, 16);
  EXPECT_EQ(*pixels->at(0, 0), 100);  // the fake draws class 4 so
}

TEST_F(CliTest, AnImageThatCannotBeWrittenCostsNoOther) {
  std::filesystem::create_directory(Path("w-1.png"));
  const auto partly =
      Run({"generate", "-l", "7", "-n", "4", "-o", Path("w.png"), "--animate", Path("a.webp")});
  EXPECT_EQ(partly.exit_code, 1);
  EXPECT_EQ(partly.err, "error: cannot write " + Path("w-1.png") + ": Is a directory\n");
  for (const char* name : {"w-0.png", "w-2.png", "w-3.png", "a.webp"}) {
    EXPECT_THAT(partly.out, HasSubstr(Path(name)));
    EXPECT_TRUE(std::filesystem::is_regular_file(Path(name))) << name;
  }
  EXPECT_THAT(partly.out, HasSubstr("4 images in "));
}

TEST_F(CliTest, NoPictureTakesThePlaceOfAnotherFile) {
  ASSERT_TRUE(WriteFile(Path("in.png"), "a picture").ok());
  std::filesystem::create_symlink("in.png", Path("link.png"));
  const std::string in = Path("in.png"), animation = Path("y-0.webp");
  for (const auto& [flags, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"-o", Path("x.webp"), "--animate", Path("./x.webp")}, "--animate and --out are both "},
           {{"-n", "2", "-o", Path("y.webp"), "-a", animation}, "--out are both " + animation},
           {{"-s", "7,9", "-o", Path("{seed}.webp"), "-a", Path("9.webp")}, "9.webp; use another"},
           {{"-l", "3", "-o", Path("{label}.webp"), "-a", Path("3.webp")}, "3.webp; use another"},
           {{"a digit", "-o", Path("{label}.webp"), "-a", Path("none.webp")}, "none.webp; use"},
           {{"--init-image", in, "-o", in}, "--init-image and --out are both " + in},
           {{"--init-image", in, "--mask", in, "-o", Path("link.png")}, "link.png; use another"},
           {{"--init-image", in, "--grid", "2x1", "-o", in}, "--init-image and --out are both "}}) {
    std::vector<std::string> arguments = {"generate"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const auto result = Run(arguments);
    EXPECT_EQ(result.exit_code, 2) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
  }
  // So also the file that is the default.
  const auto by_default = RunProcess(
      {"/bin/sh", "-c", R"(cd "$1" && cp in.png denoised.png && "$2" --server "$3" generate \
       --init-image denoised.png)",
       "sh", folder_.path(), DENOISE_BINARY, server_.address()});
  EXPECT_THAT(by_default.err, HasSubstr("--init-image and --out are both denoised.png"));
  EXPECT_EQ(server_.generations(), 0);
  EXPECT_EQ(Run({"generate", "-n", "2", "-o", Path("y.webp"), "-a", Path("y.webp")}).exit_code, 0);
  // The server chooses the model, so this is known when the picture is saved.
  const auto late = Run({"generate", "-o", Path("{model}.webp"), "-a", Path("digits.webp")});
  EXPECT_EQ(late.exit_code, 2);
  EXPECT_THAT(late.err, HasSubstr("--animate and --out are both " + Path("digits.webp")));
  EXPECT_THAT(late.out, HasSubstr("frame"));  // the animation is there
}

TEST_F(CliTest, ImagesAreSavedAlsoWhenNobodyReadsTheLines) {
  ASSERT_EQ(mkfifo(Path("closed").c_str(), 0600), 0);
  const auto result =
      RunProcess({"/bin/sh", "-c",
                  R"({ cat "$1" && "$2" --server "$3" generate -n 200 -o "$4"; echo $? >&2; } |
          { exec <&-; : >"$1"; })",
                  "sh", Path("closed"), DENOISE_BINARY, server_.address(), Path("{index}.png")});
  EXPECT_EQ(result.err, "error: stdout cannot be written, the output is incomplete\n1\n");
  EXPECT_TRUE(std::filesystem::exists(Path("199.png")));
}

TEST_F(CliTest, SpeaksTls) {
  const TestAuthority authority;
  const KeyPair pair = authority.Issue("server", "IP:127.0.0.1");
  grpc::SslServerCredentialsOptions options;
  options.pem_key_cert_pairs = {{pair.key, pair.certificate}};
  FakeServer server(grpc::SslServerCredentials(options));
  std::ofstream(Path("ca")) << authority.certificate();
  std::ofstream(Path("token")) << "open-sesame\n";
  // Threads of gRPC may outlive main(), and what OpenSSL keeps for each is lost then, as in
  // tests/tls/certificates.cc. The first line is that of tests/lsan.supp.
  std::ofstream(Path("lsan.supp")) << "leak:libcares.so\nleak:libcrypto.so\n";
  const auto run = [&](const std::vector<std::string>& flags,
                       std::vector<std::string> environment = {}) {
    std::vector<std::string> command = {DENOISE_BINARY, "--server", server.address(), "models"};
    command.insert(command.end(), flags.begin(), flags.end());
    environment.push_back("LSAN_OPTIONS=print_suppressions=0:suppressions=" + Path("lsan.supp"));
    return RunProcess(command, environment);
  };
  EXPECT_EQ(run({"--tls-ca", Path("ca"), "--token-file", Path("token")}).exit_code, 0);
  const auto wrong = run({"--tls-ca", Path("token")});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_EQ(wrong.err, "error: --tls-ca: \"" + Path("token") +
                           "\" holds no certificate in PEM, \"-----BEGIN CERTIFICATE-----\"\n");
  for (const char* flag : {"--tls-ca", "--token-file"}) {
    const auto absent = run({"--tls", flag, "/absent"});
    EXPECT_EQ(absent.exit_code, 2);
    EXPECT_EQ(
        absent.err,
        fmt::format("error: {}: \"/absent\" cannot be read: No such file or directory\n", flag));
  }
  EXPECT_EQ(server.authorization(), "Bearer open-sesame");
  EXPECT_EQ(run({}, {"DENOISE_TLS_CA=" + Path("ca")}).exit_code, 0);
  EXPECT_EQ(run({}).exit_code, 3);
  const auto strange = run({"--tls"});
  EXPECT_EQ(strange.exit_code, 3) << "the system's authorities know nothing of ours";
  EXPECT_THAT(strange.err, StartsWith("error: ")) << "without gRPC's own log";
  const auto bare = run({"--token-file", Path("token")});
  EXPECT_EQ(bare.exit_code, 2);
  EXPECT_THAT(bare.err, HasSubstr("tls"));
  EXPECT_THAT(run({"--tls-ca", Path("absent")}).err, HasSubstr("absent"));
}

TEST_F(CliTest, EveryHelpHasAnExampleOfItsOwn) {
  using Words = std::vector<std::string>;
  for (const Words& words : {Words{},
                             {"generate"},
                             {"models"},
                             {"models", "load"},
                             {"models", "unload"},
                             {"models", "alias"},
                             {"jobs"},
                             {"jobs", "list"},
                             {"jobs", "get"},
                             {"jobs", "watch"},
                             {"jobs", "cancel"},
                             {"server"},
                             {"server", "info"},
                             {"health"},
                             {"context"},
                             {"context", "add"},
                             {"context", "list"},
                             {"context", "use"},
                             {"context", "remove"},
                             {"open"},
                             {"completion"},
                             {"bench"}}) {
    Words command = {DENOISE_BINARY};
    std::string example = "  denoise";
    for (const std::string& word : words) {
      command.push_back(word);
      example += " " + word;
    }
    command.push_back("--help");
    const auto result = RunProcess(command);
    EXPECT_EQ(result.exit_code, 0);
    const size_t examples = result.out.find("\nExample");
    ASSERT_NE(examples, std::string::npos) << example;
    EXPECT_NE(result.out.find(example, examples), std::string::npos) << example;
  }
}

TEST_F(CliTest, SendsATokenInPlaintextOnlyWhenItIsAllowed) {
  std::ofstream(Path("token")) << "open-sesame\n";
  const auto refused = Run({"models", "--token-file", Path("token")});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("--allow-plaintext-token"));
  EXPECT_EQ(Run({"models", "--token-file", Path("token"), "--allow-plaintext-token"}).exit_code, 0);
  EXPECT_EQ(server_.authorization(), "Bearer open-sesame");
}

TEST_F(CliTest, SendsHeadersAndATraceWithEveryCall) {
  const std::string trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  const std::multimap<std::string, std::string> sent = {
      {"x-tenant", "blue: sky"}, {"x-raw-bin", "\xff\x01"}, {"traceparent", trace}};
  const std::vector<std::string> headers = {"-H", "X-Tenant:  blue: sky ", "--header",
                                            "x-raw-bin: /wE="};
  for (std::vector<std::string> command : {std::vector<std::string>{"models"},
                                           {"generate", "-o", Path("x.png")},
                                           {"bench", "-n", "1", "--warm-up", "0"},
                                           {"bench", "-n", "1", "--warm-up", "0", "--unary"}}) {
    command.insert(command.begin(), headers.begin(), headers.end());
    command.insert(command.begin(), {DENOISE_BINARY, "--server", server_.address()});
    const auto result = RunProcess(command, {"TRACEPARENT=" + trace});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(server_.metadata(), testing::IsSupersetOf(sent));
  }
  for (const std::vector<std::string>& wrong : {std::vector<std::string>{"-H", "no colon"},
                                                {"-H", ": no key"},
                                                {"-H", "x-bin: no base64!"},
                                                {"-H", "a b: v"},
                                                {"-H", "grpc-timeout: 1S"},
                                                {"--traceparent", "00-1-2-3"}}) {
    auto command = wrong;
    command.push_back("models");
    const auto result = Run(command);
    EXPECT_EQ(result.exit_code, 2) << wrong[1];
    EXPECT_THAT(result.err, HasSubstr("use ")) << wrong[1];
  }
}

TEST_F(CliTest, EndsCleanlyEveryTime) {
  // A channel that ends on a gRPC thread aborts the process now and then. It shows only here: a
  // server in the same process keeps that thread alive.
  for (int i = 0; i < 60; ++i) {
    server_.FailNext(i % 2, client::Draining());
    const auto result = Run({"generate", "-o", Path("x.png")});
    ASSERT_EQ(result.exit_code, 0) << "run " << i << ": " << result.err;
  }
}

TEST_F(CliTest, DrawsAGrid) {
  const auto result = Run({"generate", "--grid", "4x2", "-l", "1,2", "-o", Path("grid.png")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::string file = Read("grid.png");
  const auto pixels = DecodePng(file);
  ASSERT_TRUE(pixels.ok()) << pixels.status();
  EXPECT_EQ(pixels->width, 4 * 17 - 1);
  EXPECT_EQ(pixels->height, 2 * 17 - 1);
  EXPECT_EQ(*pixels->at(0, 0), 25);        // class 1
  EXPECT_EQ(*pixels->at(17, 0), 50);       // class 2
  EXPECT_EQ(*pixels->at(2 * 17, 17), 25);  // the classes repeat
  EXPECT_EQ(*pixels->at(16, 0), 64);
  EXPECT_THAT(file, HasSubstr("\"sampler\":\"edm_euler\""));
}

TEST_F(CliTest, EqualGridsAreEqualFiles) {
  for (const char* id : {"first", "second"}) {
    const auto result = Run({"generate", "--grid", "2x2", "--seed", "5", "--request-id", id, "-o",
                             Path(std::string(id) + ".png"), "--json"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr(id));
  }
  EXPECT_EQ(Read("first.png"), Read("second.png"));
}

TEST_F(CliTest, EveryFlagArrives) {
  const client::Tensor noise = {
      client::Tensor::Type::kFloat32, {1, 8, 12, 1}, std::string(8 * 12 * 4, 'n')};
  ASSERT_TRUE(WriteFile(Path("noise.npy"), WriteNpy(noise)).ok());
  ASSERT_TRUE(WriteFile(Path("init.png"), "a picture").ok());
  const auto result = Run({"generate",
                           "-m",
                           "digits",
                           "--steps",
                           "7",
                           "--sampler",
                           "heun",
                           "--schedule",
                           "karras",
                           "--guidance",
                           "1.5",
                           "--eta",
                           "0.5",
                           "--churn",
                           "1",
                           "--churn-min",
                           "2",
                           "--churn-max",
                           "3",
                           "--churn-noise",
                           "4",
                           "--order",
                           "2",
                           "--size",
                           "12x8",
                           "--init-image",
                           Path("init.png"),
                           "--strength",
                           "0.25",
                           "--mask",
                           Path("init.png"),
                           "--image-guidance",
                           "1.25",
                           "--guidance-rescale",
                           "0.75",
                           "--guidance-start",
                           "0.125",
                           "--guidance-stop",
                           "0.625",
                           "--noise",
                           Path("noise.npy"),
                           "--quality",
                           "55",
                           "--request-id",
                           "me",
                           "-o",
                           Path("x.jpg")});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const v1::GenerationParams params = server_.requests().at(0);
  EXPECT_EQ(params.model(), "digits");
  EXPECT_EQ(params.steps(), 7);
  EXPECT_EQ(params.sampler(), v1::SAMPLER_HEUN);
  EXPECT_EQ(params.noise_schedule(), v1::NOISE_SCHEDULE_KARRAS);
  EXPECT_EQ(params.guidance_scale(), 1.5);
  EXPECT_EQ(params.eta(), 0.5);
  EXPECT_EQ(params.s_churn(), 1);
  EXPECT_EQ(params.s_tmin(), 2);
  EXPECT_EQ(params.s_tmax(), 3);
  EXPECT_EQ(params.s_noise(), 4);
  EXPECT_EQ(params.solver_order(), 2);
  EXPECT_EQ(params.width(), 12);
  EXPECT_EQ(params.height(), 8);
  EXPECT_EQ(params.init_image().encoded(), "a picture");
  EXPECT_EQ(params.init_image().strength(), 0.25);
  EXPECT_EQ(params.mask().encoded(), "a picture");
  EXPECT_EQ(params.image_guidance_scale(), 1.25);
  EXPECT_EQ(params.guidance_rescale(), 0.75);
  EXPECT_EQ(params.guidance_start(), 0.125);
  EXPECT_EQ(params.guidance_stop(), 0.625);
  EXPECT_EQ(params.initial_noise().data(), noise.data);
  EXPECT_EQ(params.output().quality(), 55);
  EXPECT_EQ(params.request_id(), "me");
}

TEST_F(CliTest, RawNoiseTakesTheShapeOfTheModel) {
  ASSERT_TRUE(WriteFile(Path("noise.bin"), std::string(2 * 16 * 16 * 4, 'n')).ok());
  EXPECT_EQ(
      Run({"generate", "-n", "2", "--noise", Path("noise.bin"), "-o", Path("x.png")}).exit_code, 0);
  EXPECT_EQ(server_.requests().at(0).initial_noise().shape_size(), 4);
  const auto wrong = Run({"generate", "--noise", Path("noise.bin"), "-o", Path("x.png")});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("has 2048 bytes; use 1024: float32 [1, 16, 16, 1]"));
  // Which the server alone knows if it is that of a picture.
  ASSERT_TRUE(WriteFile(Path("picture.png"), "a picture").ok());
  std::vector<std::string> edit = {
      "generate",          "-n", "2",          "--noise", Path("noise.bin"), "--init-image",
      Path("picture.png"), "-o", Path("x.png")};
  EXPECT_THAT(Run(edit).err, HasSubstr("--noise has the size of the images"));
  edit.insert(edit.end(), {"--size", "16"});
  EXPECT_EQ(Run(edit).exit_code, 0);
}

TEST_F(CliTest, NamesOfClassesFindTheOnlyModelThatReadsThem) {
  server_.HoldSeveral();
  EXPECT_EQ(Run({"generate", "--labels", "seven", "-o", Path("x.png")}).exit_code, 0);
  EXPECT_EQ(server_.requests().at(0).conditions(0).class_label(), 7);
  const auto none = Run({"generate", "--class-vectors", "1,2", "-o", Path("x.png")});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_THAT(none.err, HasSubstr("--model is not set, and no model of the server reads"));
}

TEST_F(CliTest, AModelThatIsLoadingIsWaitedFor) {
  ASSERT_TRUE(WriteFile(Path("noise.bin"), std::string(1024, '\0')).ok());
  for (const std::vector<std::string>& what : std::vector<std::vector<std::string>>{
           {"generate", "-m", "digits", "-l", "seven"},
           {"generate", "-l", "seven"},
           {"generate", "-l", "7", "--noise", Path("noise.bin")}}) {
    std::vector<std::string> arguments = what;
    arguments.insert(arguments.end(), {"-o", Path("x.png")});
    server_.LoadFor(1);
    const auto waited = Run(arguments);
    EXPECT_EQ(waited.exit_code, 0) << waited.err;
    EXPECT_EQ(server_.requests().back().conditions(0).class_label(), 7);
    server_.LoadFor(INT_MAX);
    arguments.insert(arguments.end(), {"--timeout", "0.5"});
    const auto loading = Run(arguments);
    EXPECT_EQ(loading.exit_code, 3);
    EXPECT_THAT(loading.err,
                StartsWith("error: model digits is still loading; try again when "
                           "denoise models shows it as available, or name another one"));
  }
  EXPECT_EQ(server_.generations(), 3);
  server_.LoadFor(1);
  EXPECT_EQ(Run({"bench", "-n", "1", "--warm-up", "0"}).exit_code, 0);
  const v1::GenerationParams params = server_.requests().back();
  EXPECT_EQ(params.conditions_size(), 1) << "the classes were not known";
}

TEST_F(CliTest, OnlyAModelThatMayBeTheOneIsWaitedFor) {
  server_.LoadAnother();
  ASSERT_TRUE(WriteFile(Path("noise.bin"), std::string(1024, '\0')).ok());
  for (const std::vector<std::string>& what : std::vector<std::vector<std::string>>{
           {"-l", "seven"}, {"-l", "7", "--noise", Path("noise.bin")}}) {
    std::vector<std::string> arguments = {"generate", "-o", Path("x.png"), "--timeout", "0.9"};
    arguments.insert(arguments.end(), what.begin(), what.end());
    const auto result = Run(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(server_.requests().back().conditions(0).class_label(), 7);
  }
  const auto loading =
      Run({"generate", "--class-vectors", "1,2", "--timeout", "0.3", "-o", Path("x.png")});
  EXPECT_EQ(loading.exit_code, 3);
  EXPECT_THAT(loading.err, StartsWith("error: model cats is still loading; "));
}

TEST_F(CliTest, TheWaitForAModelIsAPartOfTheTimeout) {
  server_.LoadFor(1);
  server_.SetEvaluationTime(std::chrono::milliseconds(400));  // each of four
  const auto result = Run({"generate", "-l", "seven", "--timeout", "2", "-o", Path("x.png")});
  EXPECT_EQ(result.exit_code, 4) << result.err;
  EXPECT_EQ(server_.generations(), 1);
}

TEST_F(CliTest, AnInterruptEndsTheWaitForAModel) {
  server_.LoadFor(INT_MAX);
  Process process(Command({"generate", "-l", "seven", "-o", Path("x.png")}), {}, false);
  EXPECT_TRUE(Eventually([&] { return !server_.metadata().empty(); }));
  process.Signal(SIGINT);
  EXPECT_EQ(process.Wait().exit_code, 130);
}

TEST_F(CliTest, TheFormatIsWhatTheNameEndsIn) {
  for (const auto& [name, format] :
       {std::pair{"x.jpg", v1::IMAGE_FORMAT_JPEG}, std::pair{"x.jpeg", v1::IMAGE_FORMAT_JPEG},
        std::pair{"x.webp", v1::IMAGE_FORMAT_WEBP}, std::pair{"x", v1::IMAGE_FORMAT_PNG}}) {
    EXPECT_EQ(Run({"generate", "-o", Path(name)}).exit_code, 0);
    EXPECT_EQ(server_.requests().back().output().format(), format) << name;
  }
  const auto differs = Run({"generate", "-o", Path("x.jpg"), "--format", "png"});
  EXPECT_EQ(differs.exit_code, 2);
  EXPECT_THAT(differs.err, HasSubstr("but --format is png; leave --format out"));
}

TEST_F(CliTest, ANameThatEndsInNoFormatNeedsOne) {
  const auto gif = Run({"generate", "-o", Path("x.gif")});
  EXPECT_EQ(gif.exit_code, 2);
  EXPECT_THAT(gif.err, HasSubstr("x.gif, and .gif is no format; let it end in .png, "));
  EXPECT_EQ(server_.generations(), 0);
  EXPECT_EQ(Run({"generate", "-o", Path("x.v1.5"), "--format", "png"}).exit_code, 0);
  EXPECT_TRUE(DecodePng(Read("x.v1.5")).ok());
}

TEST_F(CliTest, WritesArrays) {
  EXPECT_EQ(Run({"generate", "-o", Path("x.npy")}).exit_code, 0);
  const auto tensor = ReadNpy(Read("x.npy"));
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_THAT(tensor->shape, testing::ElementsAre(16, 16, 1));
  EXPECT_EQ(Run({"generate", "--format", "raw", "-o", Path("x.raw")}).exit_code, 0);
  EXPECT_EQ(Read("x.raw").size(), 16u * 16 * 4);
}

TEST_F(CliTest, WritesToStdout) {
  const auto result = Run({"generate", "-o", "-"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(DecodePng(result.out).ok());
  EXPECT_EQ(Run({"generate", "-n", "2", "-o", "-"}).exit_code, 2);
  const int before = server_.generations();
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"generate", "-o", "-"}, {"jobs", "watch", "x", "-o", "-"}}) {
    const auto terminal = RunOnTerminal(Command(arguments), {"TERM=dumb"});
    EXPECT_EQ(terminal.exit_code, 2);
    EXPECT_THAT(terminal.out, StartsWith("error: --out - would write the bytes of a picture into"));
  }
  EXPECT_EQ(server_.generations(), before);
}

TEST_F(CliTest, WhereAJobIsSavedIsCheckedBeforeItIsWatched) {
  const auto watch = [this](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"jobs", "watch", "x"});
    return Run(flags);
  };
  for (const auto& [flags, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"-o", Path("absent/x.webp")}, "create it or write elsewhere"},
           {{"-o", Path("{foo}.webp")}, "{foo} in the path "},
           {{"-o", "x.jpg"}, "--out is x.jpg, but the images of the job are webp; let it end in "},
           {{"-o", "x.gif"}, "--out is x.gif, but the images of the job are webp"},
           {{"-o", "-"}, "--out - can take one image"},
           {{"-o", "-", "--json"}, "--json and --out - both want stdout"}}) {
    const auto result = watch(flags);
    EXPECT_EQ(result.exit_code, 2) << flags[1];
    EXPECT_THAT(result.err, HasSubstr(message));
  }
  EXPECT_EQ(server_.watched().request_id(), "");
  for (const char* name : {"x.webp", "x"}) EXPECT_EQ(watch({"-o", Path(name)}).exit_code, 0);
  EXPECT_EQ(server_.watched().request_id(), "x");
}

TEST_F(CliTest, SavesAnAnimation) {
  const auto result =
      Run({"generate", "-n", "3", "-o", Path("x.png"), "--animate", Path("a.webp")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr(Path("a.webp") + "  4 frames\n"));
  const std::string file = Read("a.webp");
  EXPECT_EQ(file.substr(0, 4), "RIFF");
  EXPECT_THAT(file, HasSubstr("ANIM"));
  EXPECT_EQ(Run({"generate", "--animate", Path("a.gif")}).exit_code, 2);
}

TEST_F(CliTest, FramesThatAnAnimationLacksAreTold) {
  const std::string path = Path("a.webp");
  const std::vector<std::string> arguments = {"generate", "-o", Path("x.png"), "--animate", path};
  const auto with = [&arguments](std::vector<std::string> more) {
    more.insert(more.begin(), arguments.begin(), arguments.end());
    return more;
  };
  EXPECT_EQ(Run(arguments).err, "");
  server_.EndPreviewsAfter(1);
  const auto result = Run(with({"--json"}));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(
      result.err,
      "note: " + path +
          " has 2 frames of 4 evaluations, 2 are missing: the server left out previews beyond "
          "its --max-previews-per-second, or that came faster than they could be sent, or the "
          "job had already run\n");
  EXPECT_EQ(Lines(result.out).at(1)["frames"], 2);
  EXPECT_EQ(Lines(result.out).at(1)["evaluations"], 4);
  // Of every third evaluation: one preview, and the image.
  EXPECT_EQ(Run(with({"--preview-every", "3"})).err, "");
  server_.EndPreviewsAfter(2);
  EXPECT_THAT(Run(arguments).err, HasSubstr(" has 3 frames of 4 evaluations, 1 is missing: "));
  server_.EndPreviewsAfter(0);
  const auto one = Run(arguments);
  EXPECT_THAT(one.out, HasSubstr(path + "  1 frame\n"));
  EXPECT_THAT(one.err, HasSubstr(" has 1 frame of 4 evaluations, 3 are missing: "));
  // A drawing that does not complete has another reason, which is told.
  server_.OmitCompleted();
  const auto ended = Run(arguments);
  EXPECT_NE(ended.exit_code, 0);
  EXPECT_THAT(ended.out, HasSubstr(path + "  1 frame\n"));
  EXPECT_THAT(ended.err, Not(HasSubstr("missing")));
}

TEST_F(CliTest, TheEndOfAPromptThatIsNotReadIsToldInOneLine) {
  server_.SetCutOff("leaf\n");
  EXPECT_EQ(Run({"generate", "a", "-o", Path("x.png")}).err,
            "The model does not read the end of the prompt: \"leaf\\x0a\"\n");
  std::string words;
  while (words.size() < 100'000) words += "sunset ";
  server_.SetCutOff(words);
  const auto result = Run({"generate", "a", "--json", "-o", Path("x.png")});
  EXPECT_THAT(result.err,
              StartsWith("The model does not read the end of the prompt: \"sunset sun"));
  EXPECT_THAT(result.err, testing::EndsWith("…\"\n"));
  EXPECT_LT(result.err.size(), 150u);
  EXPECT_EQ(Lines(result.out).back()["params"]["prompts"][0]["cut_off"], words) << "JSON has all";
}

TEST_F(CliTest, JsonIsForPrograms) {
  const auto result =
      Run({"generate", "-n", "2", "--seed", "18446744073709551614", "--json", "-o", Path("x.png")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto lines = Lines(result.out);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0]["type"], "image");
  EXPECT_EQ(lines[1]["path"], Path("x-1.png"));
  EXPECT_EQ(lines[1]["seed"], "18446744073709551615");
  EXPECT_EQ(lines[2]["type"], "completed");
  EXPECT_EQ(lines[2]["params"]["seed"], "18446744073709551614");
  EXPECT_EQ(lines[2]["params"]["sampler"], "edm_euler");
  EXPECT_EQ(lines[2]["timing"]["total_seconds"], 0.5);

  const auto refused = Run({"generate", "--json", "--steps", "0", "-o", Path("x.png")});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_EQ(Lines(refused.out).at(0)["fields"][0]["field"], "params.steps");
}

TEST_F(CliTest, TellsEveryWrongFieldWithItsRemedy) {
  const auto result = Run({"generate", "--steps", "0", "--guidance", "-1", "-o", Path("x.png")});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.err,
            "error: --steps is 0; use 1 to 100\nerror: --guidance is -1; use 0 to 100\n");
  EXPECT_EQ(result.out, "");
  // Whether the model is needed for the request or named in it.
  for (const char* label : {"seven", "7"}) {
    const auto model = Run({"generate", "-m", "cats", "-l", label, "--json", "-o", Path("x.png")});
    EXPECT_EQ(model.exit_code, 1);
    EXPECT_EQ(model.err, "error: --model: there is no model \"cats\"; this server holds: digits\n");
    const auto json = Lines(model.out).at(0);
    EXPECT_EQ(json["reason"], "MODEL_NOT_FOUND") << label;
    EXPECT_EQ(json["message"],
              "params.model: there is no model \"cats\"; this server holds: digits");
  }
  for (const auto& [flag, name] :
       {std::pair{"--negative", "--negative[0]"}, std::pair{"--prompt-2", "--prompt-2[0]"}}) {
    EXPECT_EQ(Run({"generate", "a", flag, "\xff", "-o", Path("x.png")}).err,
              fmt::format("error: {} is not UTF-8; encode it so\n", name));
  }
  EXPECT_EQ(Run({"generate", "a", "b\xff", "-o", Path("x.png")}).err,
            "error: PROMPT[1] is not UTF-8; encode it so\n");
  for (const char* label : {"seven", "7"}) {
    EXPECT_EQ(Run({"generate", "-m", "\xff", "-l", label, "-o", Path("x.png")}).err,
              "error: --model is not UTF-8; encode it so\n");
  }
  const auto health = Run({"health", "--service", "\xff"});
  EXPECT_EQ(health.exit_code, 2);
  EXPECT_EQ(health.err, "error: --service is not UTF-8; encode it so\n");
  EXPECT_EQ(Run({"bench", "-x", "model=\xff"}).err, "error: -x model is not UTF-8; encode it so\n");
  EXPECT_THAT(Run({"bench", "--trace", "prompts.text"}).err,
              StartsWith("error: cannot read prompts.text: No such file"));
  EXPECT_THAT(Run({"generate", "a", "--init-image", "params.seed.png"}).err,
              StartsWith("error: --init-image: cannot read params.seed.png: No such file"));
}

TEST_F(CliTest, UsageErrorsSendNothing) {
  const std::vector<std::vector<std::string>> wrong = {
      {},
      {"draw"},
      {"generate", "--nonsense"},
      {"generate", "--sampler", "magic"},
      {"generate", "--grid", "4"},
      {"generate", "--grid", "2x2", "-n", "5"},
      {"generate", "--grid", "2x2", "--format", "webp"},
      {"generate", "--steps", "many"},
      {"generate", "--timeout", "0"},
      {"generate", "--guidance="},
      {"generate", "--size", "0x8"},
      {"generate", "--strength", "0.5"},
      {"generate", "--mask", Path("absent.png")},
      {"generate", "--labels", "eleven"},
      {"generate", "--noise", Path("absent.npy")},
      {"generate", "--init-image", Path("absent.png")},
      {"generate", "-o", Path("absent/x.png")},
      {"generate", "-o", Path("{what}.png")},
      {"generate", "--json", "-o", "-"},
      {"generate", "a", "--labels", "3"}};
  for (const auto& arguments : wrong) {
    const auto result = Run(arguments);
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(arguments) << result.err;
    EXPECT_NE(result.err, "") << testing::PrintToString(arguments);
  }
  EXPECT_EQ(server_.generations(), 0);
}

TEST_F(CliTest, UsageErrorsNameTheFlagAndTheValue) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{"generate", "--timeout", "nan"}, "--timeout: nan is not a finite number"},
      {{"generate", "--guidance", "inf"}, "--guidance: inf is not a finite number"},
      {{"generate", "--steps", "1.5"}, "--steps: 1.5 is not a whole number; use one"},
      {{"generate", "--steps", "many"}, "--steps: many is not a whole number; use one"},
      {{"generate", "--steps", "99999999999"},
       "--steps: 99999999999 is too large; use a smaller whole number"},
      {{"generate", "--guidance", "high"}, "--guidance: high is not a number; use one"},
      {{"generate", "--steps", "1", "--steps", "2"}, "--steps is given 2 times; give it once"},
      {{"generate", "--count="}, "--count: the value is empty; use a number"},
      {{"generate", "-l", "7", "-n", "0"}, "--count: 0 is not a whole number from 1 to "},
      {{"generate", "-s", "1,2", "-n", "-3"}, "--count: -3 is not a whole number from 1 to "},
      {{"generate", "--preview-every", "-4"},
       "--preview-every: -4 is not a whole number from 1 to "},
      {{"health", "--wait", "nan"}, "--wait: nan is not a finite number"},
      {{"jobs", "list", "--limit", "0"},
       "--limit: 0 is not a whole number from 1 to 2147483647; use one"},
      {{"generate", "--timeout", "0"},
       "--timeout: 0 is not a number from 0.001 to 1000000; use one"},
      {{"generate", "--format", "bmp"},
       "--format: \"bmp\" is unknown; use png, jpeg, webp, npy or raw"},
      {{"generate", "--steps"}, "--steps has no value; give one"},
      {{"generate", "-o"}, "--out has no value; give one"},
      {{"generate", "--json=maybe"}, "--json: maybe is neither true nor false; use one of them"},
      {{"generate", "--timings"}, "--timings is only for --json; give both"},
      {{"generate", "--previews", "--no-previews"},
       "--previews and --no-previews cannot be given together; leave one out"},
      {{"models", "load"}, "name is missing; give it: Name of the model"},
      {{"models", "foo", "bar"}, "\"bar\" is one argument too many; leave it out"},
      {{"generate", "--grid", "100000x100000"},
       "--grid is 100000x100000; use two numbers from 1 to 65536, such as 4x3"},
      {{"generate", "-s", "010"},
       "--seed: 010 begins with a zero, which could mean octal; write 10"},
      {{"generate", "-s", "7,08"},
       "--seed: 08 begins with a zero, which could mean octal; write 8"},
      {{"generate", "-n", " 010"}, "--count:  010 begins with a zero"},
      {{"generate", "-n", "-010"}, "write -10"},
      {{"generate", "-n", "00"}, "write 0"},
      {{"generate", "--steps", "0x10"}, "--steps: 0x10 is not decimal; write 16"},
      {{"generate", "--steps", "0b11"}, "--steps: 0b11 is not decimal; write 3"},
      {{"generate", "--guidance", "0X1.8p1"},
       "--guidance: 0X1.8p1 is not decimal; write a decimal number"},
      {{"bench", "-s", "010"}, "--seed: 010 begins with a zero"},
      {{"bench", "-c", "08"}, "--concurrency: 08 begins with a zero"},
      {{"bench", "-r", "0x10"}, "--rate: 0x10 is not decimal; write 16"},
      {{"jobs", "watch", "x", "--after", "-1"}, "--after: -1 is not a whole number from 0 to "},
      {{"generate", "--sampler",
        "m\xc2\x9b"
        "31m\x1b[2J\u202e"},
       "--sampler: \"m\\x9b31m\\x1b[2J\\u202e\" is unknown; use ddpm, "},
      {{"generate", "--out", ""}, "--out: it is empty; name a file"},
      {{"generate", "--animate="}, "--animate: it is empty; name a file"},
      {{"jobs", "watch", "x", "--out="}, "--out: it is empty; name a file"},
      {{"generate", "--quality", "50"},
       "--quality is 50, but --format is png, which loses nothing"},
      {{"generate", "--quality", "50", "--grid", "2x2"},
       "--quality is 50, but --grid makes one PNG, which loses nothing; leave --quality out"},
      {{"generate", "--request-id", "\u00e9t\u00e9"},
       "--request-id: \"\u00e9t\u00e9\" is not 1 to 128 printable ASCII characters; use another "
       "id"},
      {{"generate", "--request-id", std::string(129, 'x')}, "x\" is not 1 to 128 printable"},
      {{"jobs", "watch", ""}, "id: it is empty; use what generate --detach printed"},
      {{"jobs", "get", ""}, "id: it is empty"},
      {{"jobs", "cancel", ""}, "id: it is empty"}};
  for (const auto& [arguments, message] : wrong) {
    const auto result = Run(arguments);
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(arguments) << result.err;
    EXPECT_THAT(result.err, HasSubstr(message));
  }
}

TEST_F(CliTest, AWordThatIsNoCommandIsNamedWithThoseThereAre) {
  EXPECT_THAT(Run({"generat", "--json"}).err,
              HasSubstr("\"generat\" is no command; use generate, models, jobs, "));
  EXPECT_THAT(Run({"jobs", "lst"}).err, HasSubstr("\"lst\" is no command; use list, get, "));
  // An option that nobody has, wherever it stands, and the one that is near.
  const auto unknown = [&](const std::vector<std::string>& arguments, const std::string& message) {
    const auto result = Run(arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_THAT(result.err, testing::StartsWith(message + "\n"));
  };
  unknown({"--servr", "x", "health"}, "--servr is no option; did you mean --server?");
  unknown({"generate", "a", "--sedd=4"}, "--sedd is no option; did you mean --seed?");
  unknown({"generate", "a", "--seed", "4", "--upside-down"}, "--upside-down is no option");
  unknown({"health", "-q"}, "-q is no option");
  unknown({"health", "--host", "x"}, "--host is no option");  // nothing is near
  // One that another command has, or that stands before its own.
  unknown({"health", "--sampler", "ddim"}, "--sampler is no option of health, but of generate");
  unknown({"--seed", "4", "generate", "a"}, "--seed must follow generate");
  unknown({"--servr"}, "--servr is no option; did you mean --server?");
  for (const char* word : {"--seed", "--"})
    EXPECT_THAT(Run({word}).err, HasSubstr("A command is required; use generate, ")) << word;
  EXPECT_THAT(Run({"jobs"}).err, HasSubstr("A command is required; use list, get, "));
}

TEST_F(CliTest, FloatsMayBeginWithZeros) {
  EXPECT_EQ(Run({"generate", "--guidance", "010", "--eta", "0.5", "--churn", "0", "-n", "1", "-s",
                 "0", "-o", Path("x.png")})
                .exit_code,
            0);
  EXPECT_EQ(server_.requests().at(0).guidance_scale(), 10);
  EXPECT_EQ(server_.requests().at(0).seed(), 0u);
}

TEST_F(CliTest, FilesWithoutEndAreRefused) {
  const std::string large = "cannot read /dev/zero: it has more than 268435456 bytes";
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{"generate", "--noise", "/dev/zero"}, "--noise: " + large},
      {{"generate", "--init-image", "/dev/zero"}, "--init-image: " + large},
      {{"generate", "--init-image", Path("x.png"), "--mask", "/dev/zero"}, "--mask: " + large},
      {{"bench", "--trace", "/dev/zero"}, large},
      {{"bench", "--compare", "/dev/zero"}, large},
      {{"models", "--token-file", "/dev/zero", "--allow-plaintext-token"},
       "--token-file: \"/dev/zero\" has more than 1048576 bytes"},
      {{"models", "--tls-ca", "/dev/zero"}, "--tls-ca: \"/dev/zero\" has more than 1048576 bytes"},
      {{"generate", "--init-image", "/dev/null"},
       "--init-image /dev/null is empty; use a PNG, JPEG, WebP or .npy file"}};
  ASSERT_TRUE(WriteFile(Path("x.png"), "a picture").ok());
  for (const auto& [arguments, message] : wrong) {
    const auto result = Run(arguments);
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(arguments) << result.err;
    EXPECT_THAT(result.err, HasSubstr(message));
  }
  EXPECT_EQ(server_.generations(), 0);
}

TEST_F(CliTest, ARequestThatIsTooLargeForTheServerIsRefusedWithItsSize) {
  ASSERT_TRUE(WriteFile(Path("x.png"), std::string(65 << 20, 'x')).ok());  // the fake takes 64 MiB
  const auto result = Run({"generate", "--init-image", Path("x.png"), "-o", Path("y.png")});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, StartsWith("error: the request has 681574"));
  EXPECT_THAT(result.err, HasSubstr(" bytes (65.0 MiB), and the server takes at most 67108864 "
                                    "(64.0 MiB); make the pictures or the noise in it smaller"));
}

TEST_F(CliTest, HelpTeaches) {
  for (const char* command : {"generate", "models", "health"}) {
    const auto result = Run({command, "--help"});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_THAT(result.out, HasSubstr("Usage: denoise"));
  }
  EXPECT_THAT(Run({"--help"}).out, HasSubstr("Exit codes"));
  EXPECT_THAT(Run({"--version"}).out, StartsWith("0."));
}

TEST_F(CliTest, AFullStdoutIsAnError) {
  for (const std::string command : {"models", "models --json", "--help", "completion bash"}) {
    const auto result = RunProcess(
        {"/bin/sh", "-c",
         fmt::format("{} --server {} {} >/dev/full", DENOISE_BINARY, server_.address(), command)});
    EXPECT_EQ(result.exit_code, 1) << command;
    EXPECT_EQ(result.err, "error: stdout cannot be written, the output is incomplete\n") << command;
  }
}

TEST_F(CliTest, TimeoutHasItsExitCode) {
  server_.SetEvaluationTime(milliseconds(2000));
  const auto result = Run({"generate", "--timeout", "0.2", "-o", Path("x.png")});
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_THAT(result.err, HasSubstr("--timeout"));
}

TEST_F(CliTest, InterruptCancelsTheCall) {
  server_.SetEvaluationTime(milliseconds(5000));
  Process process(Command({"generate", "-o", Path("x.png")}), {}, false);
  ASSERT_TRUE(Eventually([&] { return server_.generations() > 0; }));
  process.Signal(SIGINT);
  const auto result = process.Wait();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_EQ(result.err, "cancelled\n");
  EXPECT_TRUE(Eventually([&] { return server_.cancelled() == 1; }));
}

TEST_F(CliTest, AHangUpCancelsTheCall) {
  const auto before = signal(SIGHUP, SIG_DFL);  // nohup may have started the tests
  server_.SetEvaluationTime(milliseconds(5000));
  Process process(Command({"generate", "-o", Path("x.png")}), {}, false);
  signal(SIGHUP, before);
  ASSERT_TRUE(Eventually([&] { return server_.generations() > 0; }));
  process.Signal(SIGHUP);
  EXPECT_EQ(process.Wait().exit_code, 130);
  EXPECT_TRUE(Eventually([&] { return server_.cancelled() == 1; }));
}

TEST_F(CliTest, ASecondInterruptEndsWhatWaitsForAFile) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  Process process(Command({"generate", "--init-image", Path("pipe"), "-o", Path("x.png")}), {},
                  false);
  int pipe = -1;  // can be opened so once it is being read
  EXPECT_TRUE(
      Eventually([&] { return (pipe = open(Path("pipe").c_str(), O_WRONLY | O_NONBLOCK)) >= 0; }));
  process.Signal(SIGINT);
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait().exit_code, 128 + SIGTERM);
  close(pipe);
}

TEST_F(CliTest, QuittingShowsTheCursor) {
  const auto before = signal(SIGQUIT, SIG_DFL);
  server_.SetEvaluationTime(milliseconds(5000));
  Process process({"/bin/sh", "-c", R"(ulimit -c 0; exec "$0" "$@")", DENOISE_BINARY, "--server",
                   server_.address(), "generate", "-o", Path("x.png")},
                  {"TERM=xterm"}, /*on_terminal=*/true);
  signal(SIGQUIT, before);
  ASSERT_TRUE(Eventually([&] { return server_.generations() > 0; }));
  process.Signal(SIGQUIT);
  const auto result = process.Wait();
  EXPECT_EQ(result.exit_code, 128 + SIGQUIT);
  // A line may still be drawn before the signal ends the process.
  const size_t hidden = result.out.rfind("\x1b[?25l"), shown = result.out.rfind("\x1b[?25h");
  ASSERT_NE(hidden, std::string::npos) << result.out;
  ASSERT_NE(shown, std::string::npos) << result.out;
  EXPECT_GT(shown, hidden);
}

TEST_F(CliTest, RetriesAServerThatDrains) {
  server_.FailNext(2, client::Draining());
  EXPECT_EQ(Run({"generate", "-o", Path("x.png")}).exit_code, 0);
  EXPECT_EQ(server_.generations(), 3);
}

const std::vector<std::string> kColours = {"COLORTERM=truecolor", "TERM=xterm", "LC_ALL=C.UTF-8",
                                           "NO_COLOR="};

TEST_F(CliTest, ShowsPreviewsOnATerminal) {
  server_.SetEvaluationTime(milliseconds(70));  // slower than the view redraws
  server_.SetPlaces({3, 1});
  const auto result =
      RunOnTerminal(Command({"generate", "-n", "2", "-p", "-o", Path("x.png")}), kColours);
  EXPECT_EQ(result.exit_code, 0) << result.out;
  EXPECT_FALSE(server_.streamed().preview().has_every_evaluations());
  EXPECT_THAT(result.out, HasSubstr("▀"));
  EXPECT_THAT(result.out, HasSubstr("\x1b[38;2;"));
  EXPECT_THAT(result.out, HasSubstr("queued: 3 images are in front, starts in 3 min 00 s"));
  EXPECT_THAT(result.out, HasSubstr("queued: 1 image is in front, starts in 1 min 00 s"));
  EXPECT_THAT(result.out, HasSubstr("8/8 evaluations"));
  EXPECT_THAT(result.out, HasSubstr(Path("x-1.png")));
  const size_t hide = result.out.find("\x1b[?25l"), show = result.out.rfind("\x1b[?25h");
  EXPECT_NE(hide, std::string::npos);
  EXPECT_LT(hide, show) << "the cursor stays hidden";
}

TEST_F(CliTest, PicturesAreDrawnAgainOnlyWhenTheyChanged) {
  // Slower than the view redraws, also if progress comes late on a busy machine.
  server_.SetEvaluationTime(milliseconds(400));
  server_.EndPreviewsAfter(0);
  const auto result = RunOnTerminal(Command({"generate", "-p", "-o", Path("x.png")}), kColours);
  EXPECT_EQ(result.exit_code, 0) << result.out;
  EXPECT_THAT(result.out, HasSubstr("3/4 evaluations"));
  // A picture is 16 rows of 32 columns, twice as large as the image. None, the image, and its last
  // drawing without the line below; not one for each progress.
  size_t rows = 0;
  for (size_t at = 0; (at = result.out.find("▀\x1b[0m", at)) != std::string::npos; ++at) ++rows;
  EXPECT_EQ(rows % 16, 0u) << result.out;
  EXPECT_LE(rows, 3u * 16) << result.out;
  EXPECT_GE(rows, 2u * 16) << result.out;
}

TEST_F(CliTest, PreviewsAreTheDefaultOfATerminalWithColours) {
  const auto run = [this](const std::vector<std::string>& flags,
                          const std::vector<std::string>& environment) {
    std::vector<std::string> arguments = {"generate", "-o", Path("x.png")};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const auto result = RunOnTerminal(Command(arguments), environment);
    EXPECT_EQ(result.exit_code, 0) << result.out;
    EXPECT_THAT(result.out, HasSubstr("evaluations"));
    EXPECT_EQ(result.out.find("▀") != std::string::npos, server_.streamed().has_preview());
    return server_.streamed();
  };
  EXPECT_EQ(run({}, kColours).preview().every_evaluations(), 4);
  EXPECT_EQ(run({"--preview-every", "2"}, kColours).preview().every_evaluations(), 2);
  EXPECT_FALSE(run({"--animate", Path("x.webp")}, kColours).preview().has_every_evaluations());
  EXPECT_FALSE(run({"--no-previews"}, kColours).has_preview());
  EXPECT_FALSE(run({"--previews=0"}, kColours).has_preview());
  EXPECT_FALSE(run({}, {"TERM=xterm", "NO_COLOR=1"}).has_preview());
  // The request must be the same as in a pipe.
  EXPECT_FALSE(run({"--request-id", "me"}, kColours).has_preview());
  EXPECT_TRUE(run({"--request-id", "me", "-p"}, kColours).has_preview());
}

TEST_F(CliTest, AnAnimationIsNotDrawnWhereNoPreviewsAreShown) {
  const std::string path = Path("a.webp");
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{"--no-previews"}, {"--request-id", "me"}}) {
    std::vector<std::string> arguments = {"generate", "-o", Path("x.png"), "--animate", path};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const auto result = RunOnTerminal(Command(arguments), kColours);
    EXPECT_EQ(result.exit_code, 0) << result.out;
    EXPECT_THAT(result.out, Not(HasSubstr("▀"))) << flags[0];
    EXPECT_THAT(result.out, HasSubstr(path + "  4 frames"));
  }
}

TEST_F(CliTest, OnlyATerminalGetsPreviewsByDefault) {
  std::vector<std::string> command = Command({"generate", "-o", Path("x.png")});
  EXPECT_EQ(RunProcess(command, kColours).exit_code, 0);
  EXPECT_FALSE(server_.streamed().has_preview());
  const auto picture = RunProcess(Command({"generate", "-o", "-"}), kColours);
  EXPECT_THAT(picture.out, StartsWith("\x89PNG"));
  EXPECT_FALSE(server_.streamed().has_preview());
  const int before = server_.generations();
  EXPECT_EQ(RunOnTerminal(Command({"generate", "-p", "-o", "-"}), kColours).out,
            "error: --out - would write the bytes of a picture into the terminal; send stdout to a "
            "file or a program, or give --out a file\r\n");
  EXPECT_EQ(server_.generations(), before);
  command.emplace_back("--json");
  EXPECT_EQ(RunOnTerminal(command, kColours).exit_code, 0);
  EXPECT_FALSE(server_.streamed().has_preview());
}

TEST_F(CliTest, TerminalsWithoutColoursGetCharacters) {
  const auto result =
      RunOnTerminal(Command({"generate", "-p", "-o", Path("x.png")}), {"TERM=vt100", "NO_COLOR=1"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, Not(HasSubstr("\x1b[38")));
  EXPECT_THAT(result.out, HasSubstr("::"));
}

TEST_F(CliTest, DumbTerminalsGetNoEscapes) {
  const auto result = RunOnTerminal(Command({"generate", "-o", Path("x.png")}), {"TERM=dumb"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, Not(HasSubstr("\x1b")));
}

TEST_F(CliTest, PreviewsWithoutATerminalAreNotAsked) {
  const auto result = Run({"generate", "-p", "-o", Path("x.png")});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err,
            "note: --previews needs a terminal, and stdout is none; no previews are shown\n");
  EXPECT_THAT(Run({"generate", "-p", "--json", "-o", Path("x.png")}).err,
              HasSubstr("--previews and --json both want stdout"));
  const auto dumb = RunOnTerminal(Command({"generate", "-p", "-o", Path("x.png")}), {"TERM=dumb"});
  EXPECT_THAT(dumb.out, HasSubstr("a terminal whose cursor can be moved, and TERM is \"dumb\""));
}

TEST_F(CliTest, OptionsThatHaveNoEffectAreTold) {
  const auto result = Run({"generate", "-o", Path("x.png"), "--preview-every", "2",
                           "--preview-kind", "noisy_state", "--preview-decoder", "linear"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err,
            "note: no previews are shown or animated, so --preview-every, --preview-kind, "
            "--preview-decoder have no effect\n");
  EXPECT_EQ(Run({"generate", "-o", Path("x.png"), "--animate", Path("a.webp"), "--preview-kind",
                 "noisy_state"})
                .err,
            "");
  EXPECT_EQ(server_.streamed().preview().kind(), v1::PREVIEW_KIND_NOISY_STATE);
  const auto detached = Run({"generate", "--detach", "-o", Path("x.png")});
  EXPECT_EQ(detached.exit_code, 2);
  EXPECT_THAT(detached.err, HasSubstr("--detach waits for no pictures; leave --out, "));
}

TEST_F(CliTest, ListsModels) {
  const auto table = Run({"models"});
  EXPECT_EQ(table.exit_code, 0);
  EXPECT_EQ(
      table.out,
      "NAME    VERSION  STATE      ALIASES  SIZE     CLASSES  WEIGHTS  SAMPLER    STEPS  DEVICE\n"
      "digits  *        available           16x16x1  10       1.23 M   edm_euler  4      cpu\n");
  EXPECT_THAT(Run({"models", "digits"}).out, AllOf(HasSubstr("edm_euler (of edm_euler, heun)"),
                                                   HasSubstr(", multiples of 4 up to 64\n")));
  const auto digits = nlohmann::json::parse(Run({"models", "digits", "--json"}).out);
  EXPECT_EQ(digits["limits"]["max_edge"], 64);
  EXPECT_EQ(nlohmann::json::parse(Run({"models", "--json"}).out)[0]["labels"][9], "nine");
  EXPECT_EQ(Run({"models", "cats"}).exit_code, 1);
}

TEST_F(CliTest, ALabelCannotCommandTheTerminal) {
  server_.AddLabel("a\x1b]0;title\x07\nb\x7f\xc2\x9b, Mädchen");
  EXPECT_THAT(Run({"models", "digits"}).out,
              HasSubstr(R"(nine, a\x1b]0;title\x07\x0ab\x7f\x9b, Mädchen)"));
}

TEST_F(CliTest, JsonCannotCommandTheTerminal) {
  const std::string text = "a\x1b\x7f\u009b31m\u2028\u202e\u2066\u2069 Mädchen\u2030";
  server_.SetText(text);
  server_.AddLabel(text);
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{"jobs", "list"},
                                             {"jobs", "get", "1"},
                                             {"server", "info"},
                                             {"models"},
                                             {"models", "digits"},
                                             {"health", "--service", text}}) {
    std::vector<std::string> arguments = command;
    arguments.emplace_back("--json");
    const auto result = Run(arguments);
    EXPECT_THAT(result.out, HasSubstr(R"(a\u001b\u007f\u009b31m\u2028\u202e\u2066\u2069 Mädchen‰)"))
        << command[0];
  }
}

TEST_F(CliTest, HealthIsInTheExitCode) {
  EXPECT_EQ(Run({"health"}).exit_code, 0);
  EXPECT_EQ(Run({"health"}).out, "SERVING\n");
  server_.SetServing(false);
  const auto down = Run({"health"});
  EXPECT_EQ(down.exit_code, 1);
  EXPECT_EQ(down.out, "NOT_SERVING\n");
  EXPECT_EQ(nlohmann::json::parse(Run({"health", "--json"}).out)["status"], "NOT_SERVING");
  EXPECT_EQ(Run({"health", "--service", "no.such"}).exit_code, 1);
}

TEST_F(CliTest, HealthDoesNotWaitForWhatCannotBeAsked) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"health", "--traceparent", "garbage"},
           {"health", "--wait", "600", "--traceparent", "garbage"}}) {
    const auto result = Run(arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_THAT(result.err, StartsWith("error: traceparent is \"garbage\"; use "));
    EXPECT_EQ(result.out, "");
  }
}

/// The command with its errors in a file, which is read while it runs.
std::vector<std::string> WithErrorsIn(const std::string& file, std::vector<std::string> command) {
  command.insert(command.begin(),
                 {"/bin/sh", "-c", R"(err=$1; shift; exec "$@" 2>"$err")", "sh", file});
  return command;
}

TEST_F(CliTest, HealthWaitsAndTellsForWhat) {
  server_.SetServing(false);
  Process process(WithErrorsIn(Path("err"), Command({"health", "--wait", "60"})), {}, false);
  EXPECT_TRUE(Eventually([&] { return ReadFile(Path("err")).value_or("").ends_with("\n"); }));
  server_.SetServing(true);
  EXPECT_EQ(process.Wait().exit_code, 0);
  const std::string err = Read("err");
  EXPECT_THAT(err, StartsWith("waiting for the server (NOT_SERVING): "));
  EXPECT_EQ(std::count(err.begin(), err.end(), '\n'), 1) << err;
}

TEST_F(CliTest, HealthWaitsForAServerThatDoesNotListenYet) {
  for (const char* host : {"127.0.0.1", "localhost"}) {
    const std::string address = fmt::format("{}:{}", host, training::FreePort());
    v1::ImageGeneration::Service service;  // gRPC wants one
    Process process(
        WithErrorsIn(Path(host), {DENOISE_BINARY, "--server", address, "health", "--wait", "60"}),
        {}, false);
    EXPECT_TRUE(Eventually([&] { return !ReadFile(Path(host)).value_or("").empty(); }));
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials());
    builder.RegisterService(&service);
    const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
    ASSERT_NE(server, nullptr) << address;
    EXPECT_EQ(process.Wait().exit_code, 0) << address << "\n" << Read(host);
    server->Shutdown();
  }
}

TEST_F(CliTest, BenchTellsWhatItMeasured) {
  const auto result = Run({"bench", "-c", "4", "-n", "20", "--warm-up", "0", "--connections", "2",
                           "-x", "steps=3..5,priority=interactive,previews=1", "-x", "count=2",
                           "--json", Path("bench.json"), "--save-trace", Path("trace.jsonl")});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out, StartsWith("20 requests: 20 succeeded, 0 failed in "));
  EXPECT_THAT(result.out, HasSubstr("first preview"));
  EXPECT_EQ(server_.generations(), 20);
  const auto json = nlohmann::json::parse(Read("bench.json"));
  EXPECT_EQ(json["succeeded"], 20);
  EXPECT_EQ(json["queued_seconds"]["p99"], 0.25);
  EXPECT_EQ(json["image_hashes"].size(), json["images"]);
  EXPECT_EQ(json["kinds"].size(), 2);
  EXPECT_GT(json["images_per_second"], 0);
  bool ranged = false;
  for (const v1::GenerationParams& params : server_.requests()) {
    EXPECT_EQ(params.conditions(0).class_label(), params.seed() % 10);
    if (params.has_count()) continue;
    EXPECT_EQ(params.priority(), v1::PRIORITY_INTERACTIVE);
    EXPECT_GE(params.steps(), 3);
    EXPECT_LE(params.steps(), 5);
    ranged = true;
  }
  EXPECT_TRUE(ranged);

  // The trace asks for the same again.
  const auto again = Run({"bench", "--trace", Path("trace.jsonl"), "--speed", "10", "--compare",
                          Path("bench.json"), "--json", "-"});
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(nlohmann::json::parse(again.out)["images_compared"], json["images"]);
}

TEST_F(CliTest, BenchFindsImagesThatDiffer) {
  const std::vector<std::string> bench = {"bench", "-n", "5", "--warm-up", "0", "--unary"};
  const auto with = [&bench](std::vector<std::string> more) {
    more.insert(more.begin(), bench.begin(), bench.end());
    return more;
  };
  ASSERT_EQ(Run(with({"--json", Path("before.json")})).exit_code, 0);
  EXPECT_EQ(Run(with({"--compare", Path("before.json")})).exit_code, 0);
  const auto others = Run(with({"--compare", Path("before.json"), "--seed", "2"}));
  EXPECT_EQ(others.exit_code, 1);
  EXPECT_THAT(others.err, HasSubstr("the earlier run has none of these images"));
  std::ofstream(Path("twice.json")) << R"({"image_hashes": {"a": "0", "a": "1"}})";
  const auto twice = Run(with({"--compare", Path("twice.json")}));
  EXPECT_EQ(twice.exit_code, 2);
  EXPECT_THAT(twice.err, HasSubstr("twice.json: has \"a\" twice; give it once"));
  server_.SetImageBytes(100);
  const auto changed = Run(with({"--compare", Path("before.json")}));
  EXPECT_EQ(changed.exit_code, 1);
  EXPECT_THAT(changed.out, HasSubstr("5 compared with the earlier run, 5 differ"));
  EXPECT_THAT(changed.out, HasSubstr("differs: digits seed="));
}

TEST_F(CliTest, BenchCountsErrorsWithoutRetrying) {
  server_.FailNext(3, client::QueueFull(milliseconds(10)));
  const auto result = Run({"bench", "-r", "200", "-n", "10", "--warm-up", "0"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, StartsWith("10 requests: 7 succeeded, 3 failed"));
  EXPECT_THAT(result.out, HasSubstr("3 x RESOURCE_EXHAUSTED QUEUE_FULL: the queue is full"));
  server_.SetEvaluationTime(milliseconds(200));
  const auto late = Run({"bench", "-n", "2", "--warm-up", "0", "-x", "deadline=0.1"});
  EXPECT_EQ(late.exit_code, 1) << "nothing succeeded";
  EXPECT_THAT(late.out, HasSubstr("2 x DEADLINE_EXCEEDED"));
}

TEST_F(CliTest, BenchRefusesWhatDoesNotFitTogether) {
  for (const std::vector<std::string>& flags :
       std::vector<std::vector<std::string>>{{"-r", "1", "-c", "1"},
                                             {"-r", "nan"},
                                             {"-c", "0"},
                                             {"--speed", "2"},
                                             {"--trace", Path("none.jsonl"), "-x", "steps=4"}}) {
    std::vector<std::string> arguments = {"bench"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    EXPECT_EQ(Run(arguments).exit_code, 2) << flags[0] << " " << flags[1];
  }
  const auto mix = Run({"bench", "-x", "priority=urgent"});
  EXPECT_EQ(mix.exit_code, 2);
  EXPECT_THAT(mix.err, HasSubstr("--mix: priority is \"urgent\"; use one of interactive"));
  EXPECT_EQ(server_.generations(), 0);
}

TEST_F(CliTest, BenchSaysHowToNameTheModel) {
  server_.HoldSeveral();
  const auto result = Run({"bench", "-n", "1"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.err,
            "error: the model is not set, and the server holds several models; use one of: cats, "
            "digits; give it with -x model=NAME\n");
}

TEST_F(CliTest, BenchShowsProgressOnATerminal) {
  const auto result = RunOnTerminal(Command({"bench", "-n", "5", "--warm-up", "0"}));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr(" under way, "));
  EXPECT_THAT(result.out, HasSubstr("5 requests: 5 succeeded"));
}

TEST_F(CliTest, BenchTellsWhenInterrupted) {
  server_.SetEvaluationTime(milliseconds(5));
  Process process(Command({"bench", "-d", "600", "--warm-up", "0"}), {}, /*on_terminal=*/false);
  ASSERT_TRUE(Eventually([&] { return server_.generations() >= 3; }));
  process.Signal(SIGINT);
  const ProcessResult result = process.Wait();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_THAT(result.out, HasSubstr("succeeded, 0 failed, 1 cancelled"));
}

TEST_F(CliTest, TakesReplicas) {
  FakeServer other;
  const std::string both = server_.address() + "," + other.address();
  for (int i = 0; i < 10; ++i) {
    const auto result = RunProcess(
        {DENOISE_BINARY, "--server", both, "generate", "-l", "three", "-o", Path("x.png")});
    ASSERT_EQ(result.exit_code, 0) << result.err;
  }
  EXPECT_EQ(RunProcess({DENOISE_BINARY, "--server", both, "health"}).out, "SERVING\n");
  EXPECT_EQ(RunProcess({DENOISE_BINARY, "--server", both, "jobs", "get", "x"}).exit_code, 2);
  EXPECT_EQ(RunProcess({DENOISE_BINARY, "--server", both + ",host:1", "models"}).exit_code, 2);

  const auto detached =
      RunProcess({DENOISE_BINARY, "--server", both, "generate", "--detach", "--json"});
  ASSERT_EQ(detached.exit_code, 0) << detached.err;
  const std::string server = Lines(detached.out).at(0)["server"];
  EXPECT_THAT((std::vector{"ipv4:" + server_.address(), "ipv4:" + other.address()}),
              testing::Contains(server));
  EXPECT_EQ(RunProcess({DENOISE_BINARY, "--server", server, "models"}).exit_code, 0);
}

TEST(CliWithoutServerTest, SaysSo) {
  const std::vector<std::string> environment = {"DENOISE_SERVER=127.0.0.1:1"};
  const auto health = RunProcess({DENOISE_BINARY, "health"}, environment);
  EXPECT_EQ(health.exit_code, 3);
  EXPECT_EQ(health.out, "UNREACHABLE\n");
  EXPECT_THAT(health.err, HasSubstr("127.0.0.1:1"));
  const auto waited = RunProcess({DENOISE_BINARY, "health", "--wait", "0.5"}, environment);
  EXPECT_EQ(waited.exit_code, 3);
  EXPECT_EQ(waited.out, "UNREACHABLE\n");
  const auto generate =
      RunProcess({DENOISE_BINARY, "generate", "-o", "/tmp/never.png"}, environment);
  EXPECT_EQ(generate.exit_code, 3);
  EXPECT_THAT(generate.err, HasSubstr("--server HOST:PORT or DENOISE_SERVER"));
}

}  // namespace
}  // namespace denoised::command
