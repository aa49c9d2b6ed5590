// SPDX-License-Identifier: Apache-2.0
// What the denoise program does for a person at a shell: contexts, completion, man pages, the page.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <list>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "command/files.h"
#include "tests/client/fake_service.h"
#include "tests/client/process.h"
#include "tests/io/temporary_directory.h"

namespace denoised::command {
namespace {

using client::FakeServer;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;
using Words = std::vector<std::string>;

class ShellTest : public testing::Test {
 protected:
  ProcessResult Run(Words words, Words environment = {}) const {
    words.insert(words.begin(), DENOISE_BINARY);
    environment.push_back("XDG_CONFIG_HOME=" + folder_.path());
    return RunProcess(words, environment);
  }
  /// What may stand for the last of the words, with a server to ask for models.
  Words Complete(const Words& words) const {
    Words command = {"complete-words"};
    command.insert(command.end(), words.begin(), words.end());
    std::istringstream lines(Run(command, {"DENOISE_SERVER=" + server_.address()}).out);
    Words candidates;
    for (std::string line; std::getline(lines, line);) {
      candidates.push_back(line.substr(0, line.find('\t')));
    }
    return candidates;
  }
  std::string contexts() const { return folder_ / "denoised/contexts.json"; }
  std::string Token() const { return folder_.Write("token", "open-sesame\n"); }

  FakeServer server_;
  TemporaryDirectory folder_;
};

TEST_F(ShellTest, AContextStandsForTheOptionsOfAConnection) {
  const auto added =
      Run({"context", "add", "studio", "--server", server_.address(), "--token-file", Token(),
           "--allow-plaintext-token", "-H", "x-tenant: blue", "--page", "http://studio:8080/"});
  ASSERT_EQ(added.exit_code, 0) << added.err;
  ASSERT_EQ(Run({"context", "add", "nowhere", "--server", "127.0.0.1:1"}).exit_code, 0);

  // The first one is the current one.
  ASSERT_EQ(Run({"models"}).exit_code, 0);
  EXPECT_EQ(server_.authorization(), "Bearer open-sesame");
  EXPECT_THAT(server_.metadata(), Contains(testing::Pair("x-tenant", "blue")));
  EXPECT_EQ(Run({"models", "--context", "nowhere"}).exit_code, 3);
  EXPECT_EQ(Run({"models"}, {"DENOISE_CONTEXT=nowhere"}).exit_code, 3);

  ASSERT_EQ(Run({"context", "use", "nowhere"}).exit_code, 0);
  EXPECT_EQ(Run({"models"}).exit_code, 3);
  EXPECT_EQ(Run({"models", "--context", "studio"}).exit_code, 0);
  // A flag wins over the context.
  EXPECT_EQ(Run({"models", "--context", "studio", "--server", "127.0.0.1:1"}).exit_code, 3);

  const auto listed = Run({"context", "list"});
  EXPECT_THAT(listed.out, HasSubstr("studio"));
  EXPECT_THAT(listed.out, HasSubstr("* "));
  const auto json = nlohmann::json::parse(Run({"context", "list", "--json"}).out);
  ASSERT_EQ(json.size(), 2u);
  EXPECT_EQ(json[0]["name"], "nowhere");
  EXPECT_EQ(json[0]["current"], true);
  EXPECT_EQ(json[1]["page"], "http://studio:8080/");
  EXPECT_FALSE(json[1].contains("headers")) << "they may hold secrets";

  ASSERT_EQ(Run({"context", "remove", "nowhere"}).exit_code, 0);
  EXPECT_EQ(nlohmann::json::parse(Run({"context", "list", "--json"}).out)[0]["current"], false);
}

TEST_F(ShellTest, ContextsThatAreAddedAtTheSameTimeAreAllKept) {
  constexpr int kAdded = 16;
  const std::vector<std::string> environment = {"XDG_CONFIG_HOME=" + folder_.path()};
  std::list<Process> processes;
  for (int i = 0; i < kAdded; ++i) {
    processes.emplace_back(
        Words{DENOISE_BINARY, "context", "add", "c" + std::to_string(i), "--server", "x:1"},
        environment, /*on_terminal=*/false);
  }
  for (Process& process : processes) EXPECT_EQ(process.Wait().exit_code, 0);
  EXPECT_EQ(nlohmann::json::parse(Run({"context", "list", "--json"}).out).size(), kAdded);
}

TEST_F(ShellTest, ATokenGoesToNoServerButThatOfItsContext) {
  const std::string here = server_.address();
  const auto add = [&](const std::string& name, const std::string& server) {
    const auto added = Run({"context", "add", name, "--server", server, "--token-file", Token(),
                            "--allow-plaintext-token", "-H", "x-key: secret"});
    ASSERT_EQ(added.exit_code, 0) << added.err;
  };
  add("studio", "studio:50051");
  add("here", here);
  const std::string server = "DENOISE_SERVER=" + here, context = "DENOISE_CONTEXT=studio";
  for (const auto& [words, environment] : std::vector<std::pair<Words, Words>>{
           {{"models", "--server", here}, {}},
           {{"models"}, {server}},
           {{"models", "--server", here}, {context}},
           {{"models"}, {server, context}},
           {{"models", "--server", here, "--context", "studio"}, {}},
           {{"models", "--context", "studio"}, {server}}}) {
    const auto result = Run(words, environment);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(server_.authorization(), "") << testing::PrintToString(words);
    EXPECT_THAT(server_.metadata(), Not(Contains(testing::Key("x-key"))));
  }
  // To its own server, whoever names that.
  for (const Words& words :
       {Words{"models", "--context", "here"}, {"models", "--context", "here", "--server", here}}) {
    EXPECT_EQ(Run(words).exit_code, 0);
    EXPECT_EQ(server_.authorization(), "Bearer open-sesame");
    EXPECT_THAT(server_.metadata(), Contains(testing::Pair("x-key", "secret")));
  }
  // The page is the server's too.
  ASSERT_EQ(Run({"context", "add", "paged", "--server", "x:1", "--page", "https://x/"}).exit_code,
            0);
  const Words neither = {"DISPLAY=", "WAYLAND_DISPLAY=", "BROWSER="};
  EXPECT_EQ(Run({"open", "--context", "paged"}, neither).out, "https://x/\n");
  EXPECT_EQ(Run({"open", "--context", "paged", "--server", "y:1"}, neither).out,
            "http://y:8080/\n");
}

TEST_F(ShellTest, AnotherServerThanThatOfTheContextIsNotTrustedAsItIs) {
  const std::string here = server_.address(), token = Token();
  ASSERT_EQ(Run({"context", "add", "mesh", "--server", "mesh:50051", "--allow-plaintext-token"})
                .exit_code,
            0);
  // Nobody allowed a token without TLS for this server.
  Words words = {"models", "--context", "mesh", "--server", here, "--token-file", token};
  const auto refused = Run(words);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("token_file needs tls"));
  EXPECT_EQ(server_.authorization(), "");
  words.emplace_back("--allow-plaintext-token");
  EXPECT_EQ(Run(words).exit_code, 0);
  EXPECT_EQ(server_.authorization(), "Bearer open-sesame");

  ASSERT_EQ(Run({"context", "add", "mutual", "--server", "mutual:50051", "--tls-cert", token,
                 "--tls-key", token})
                .exit_code,
            0);
  const auto half = Run({"models", "--context", "mutual", "--server", here, "--tls-cert", token});
  EXPECT_EQ(half.exit_code, 2);
  EXPECT_THAT(half.err, HasSubstr("belong together")) << "the key is the context's";
  // The certificate had turned TLS on, and without it TLS stays on.
  EXPECT_EQ(Run({"open", "--context", "mutual", "--server", "y:1"},
                {"DISPLAY=", "WAYLAND_DISPLAY=", "BROWSER="})
                .out,
            "https://y:8080/\n");
}

TEST_F(ShellTest, OnlyTheOwnerReadsContexts) {
  ASSERT_EQ(
      Run({"context", "add", "a", "--server", server_.address(), "-H", "x-key: secret"}).exit_code,
      0);
  struct stat information = {};
  ASSERT_EQ(stat(contexts().c_str(), &information), 0);
  EXPECT_EQ(information.st_mode & 0777, 0600u);
  ASSERT_EQ(chmod(contexts().c_str(), 0644), 0);
  const auto refused = Run({"models"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("chmod 600"));
}

TEST_F(ShellTest, WhatIsWrongWithAContextIsSaid) {
  const auto expect = [&](const Words& words, const std::string& text) {
    const auto result = Run(words);
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(words);
    EXPECT_THAT(result.err, HasSubstr(text));
  };
  expect({"models", "--context", "studio"}, "there is no context \"studio\"; make it with");
  expect({"context", "add", "a b", "--server", "x:1"}, "\"a b\" is no name");
  expect({"context", "add", "a"}, "--server is missing");
  for (const char* server :
       {"x", ":1", "x:0", "x:65536", "x:y", "fd00::1:50051", "x:1/page", "a b:1", "me@x:1"}) {
    expect({"context", "add", "a", "--server", server}, std::string("\"") + server + "\"");
    expect({"open", "--server", server}, std::string("\"") + server + "\"");
  }
  expect({"open", "--server", "http://x:1"}, "begins with http://");
  for (const char* page : {"http://:80/", "http://x:0/", "http://x:y/", "https://[::1]:65536"}) {
    expect({"context", "add", "a", "--server", "x:1", "--page", page}, page);
    expect({"open", "--page", page}, page);
  }
  expect({"context", "add", "a", "--server", "x:1", "--token-file", "absent"}, "absent");
  expect({"context", "add", "a", "--server", "x:1", "--page", "studio"}, "neither http://");
  expect({"context", "add", "a", "--server", "x:1", "--page", "http://me:pass@x/"}, "password");
  ASSERT_EQ(Run({"context", "add", "a", "--server", "x:1"}).exit_code, 0);
  expect({"context", "add", "a", "--server", "y:1"}, "--replace");
  EXPECT_EQ(Run({"context", "add", "a", "--server", "y:1", "--replace"}).exit_code, 0);
  expect({"context", "use", "b"}, "there is no context \"b\"; use a");
  expect({"context", "remove", "b"}, "there is no context \"b\"; use a");
  for (const char* text :
       {"", "[]", "{\"contexts\": {\"a\": {\"server\": 1}}}", "{\"contexts\": 3"}) {
    folder_.Write("denoised/contexts.json", text);
    expect({"models"}, "contexts.json is not a file of contexts");
  }
  folder_.Write("denoised/contexts.json",
                R"({"contexts": {"a": {"server": "x:1", "server": "y:1"}}})");
  expect({"models"}, "mend or remove it: it has \"server\" twice; give it once");
}

TEST_F(ShellTest, RelativePathsAreKeptWhole) {
  Token();
  const auto result = RunProcess(
      {"/bin/sh", "-c", "cd \"$1\" && exec \"$2\" context add a --server x:1 --token-file token",
       "sh", folder_.path(), DENOISE_BINARY},
      {"XDG_CONFIG_HOME=" + folder_.path()});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(Run({"context", "list", "--json"}).out)[0]["token_file"],
            folder_ / "token");
}

TEST_F(ShellTest, ContextsAreNotChangedWithoutTheirLock) {
  ASSERT_EQ(Run({"context", "add", "a", "--server", "x:1"}).exit_code, 0);
  const std::string lock = contexts() + ".lock", before = *ReadFile(contexts());
  std::filesystem::remove(lock);
  std::filesystem::create_directory(lock);  // cannot be opened, also by root
  for (const Words& words : {Words{"add", "b", "--server", "x:2"}, {"use", "a"}, {"remove", "a"}}) {
    Words command = {"context"};
    command.insert(command.end(), words.begin(), words.end());
    const auto result = Run(command);
    EXPECT_EQ(result.exit_code, 1) << words[0];
    EXPECT_EQ(result.err, "error: cannot open " + lock + ": Is a directory\n");
  }
  EXPECT_EQ(*ReadFile(contexts()), before);
}

TEST_F(ShellTest, OpensThePage) {
  const std::string none = "DISPLAY=", nor = "WAYLAND_DISPLAY=", neither = "BROWSER=";
  const auto open = [&](Words words) {
    words.insert(words.begin(), "open");
    return Run(words, {none, nor, neither});
  };
  EXPECT_EQ(open({}).out, "http://127.0.0.1:8080/\n");
  EXPECT_THAT(open({}).err, HasSubstr("no browser was found"));
  EXPECT_EQ(open({"--server", "studio:50051", "--tls"}).out, "https://studio:8080/\n");
  EXPECT_EQ(open({"--page", "https://studio/page"}).out, "https://studio/page\n");
  EXPECT_EQ(open({"--server", "[fd00::1]:50051"}).out, "http://[fd00::1]:8080/\n");
  EXPECT_EQ(open({"--page", "http://[fd00::1]:80/"}).exit_code, 0);
  EXPECT_EQ(open({"--page", "javascript:alert(1)"}).exit_code, 2);
  EXPECT_THAT(open({"--server", "dns:///replicas:50051"}).err, HasSubstr("name it with --page"));
  ASSERT_EQ(Run({"context", "add", "a", "--server", "x:1", "--page", "https://a/"}).exit_code, 0);
  EXPECT_EQ(open({}).out, "https://a/\n");

  // xdg-open is given the address.
  const std::string program = folder_.Write("bin/xdg-open", "#!/bin/sh\necho \"$1\" > \"$SEEN\"\n");
  ASSERT_EQ(chmod(program.c_str(), 0755), 0);
  const auto shown = Run({"open"}, {"DISPLAY=:0", "SEEN=" + folder_ / "seen",
                                    "PATH=" + folder_ / "bin" + ":/usr/bin:/bin"});
  EXPECT_EQ(shown.exit_code, 0);
  EXPECT_EQ(shown.err, "");
  EXPECT_EQ(*ReadFile(folder_ / "seen"), "https://a/\n");
}

TEST_F(ShellTest, CompletesWords) {
  EXPECT_THAT(Complete({""}), AllOf(Contains("generate"), Contains("open"), Contains("context"),
                                    Not(Contains("man"))));
  EXPECT_THAT(Complete({"ge"}), ElementsAre("generate"));
  EXPECT_THAT(Complete({"models", "un"}), ElementsAre("unload"));
  EXPECT_THAT(Complete({"generate", "--sched"}), ElementsAre("--schedule"));
  EXPECT_THAT(Complete({"generate", "--tok"}), ElementsAre("--token-file"));
  EXPECT_THAT(Complete({"generate", "--schedule", ""}), Contains("karras"));
  EXPECT_THAT(Complete({"generate", "--schedule=k"}), ElementsAre("--schedule=karras"));
  EXPECT_THAT(Complete({"generate", "--out", ""}), ElementsAre(":files"));
  EXPECT_THAT(Complete({"--token-file", ""}), ElementsAre(":files"));
  EXPECT_THAT(Complete({"generate", "--steps", ""}), IsEmpty());
  EXPECT_THAT(Complete({"generate", "--", "--s"}), IsEmpty());
  EXPECT_THAT(Complete({"completion", ""}), ElementsAre("bash", "zsh", "fish"));
  EXPECT_THAT(Complete({"generate", "-m", ""}), Contains("digits"));
  EXPECT_THAT(Complete({"models", "d"}), Contains("digits"));
  ASSERT_EQ(Run({"context", "add", "studio", "--server", "x:1"}).exit_code, 0);
  EXPECT_THAT(Complete({"context", "use", ""}), ElementsAre("studio"));
  EXPECT_THAT(Complete({"--context", "s"}), ElementsAre("studio"));
}

TEST_F(ShellTest, EveryOptionOfTheHelpIsCompletedAndHasItsPlaceInTheManPage) {
  ASSERT_EQ(Run({"man", folder_.path()}).exit_code, 0);
  for (const Words& words :
       {Words{}, {"generate"}, {"models", "load"}, {"jobs", "watch"}, {"bench"}}) {
    Words help = words;
    help.push_back("--help");
    std::string page_name = "denoise";
    for (const std::string& word : words) page_name += "-" + word;
    const std::string page = *ReadFile(folder_ / (page_name + ".1"));
    Words typed = words;
    typed.push_back("--");
    const Words candidates = Complete(typed);
    const std::string text = Run(help).out;
    static const std::regex kOption("\n  (?:-.,)?(--[a-z0-9-]+)");
    int options = 0;
    for (std::sregex_iterator match(text.begin(), text.end(), kOption), end; match != end;
         ++match) {
      const std::string option = (*match)[1];
      EXPECT_THAT(candidates, Contains(option)) << page_name;
      const std::string roff = std::regex_replace(option, std::regex("-"), "\\-");
      EXPECT_THAT(page, HasSubstr("\\fB" + roff)) << page_name;
      ++options;
    }
    EXPECT_GT(options, 1) << page_name;
  }
}

TEST_F(ShellTest, ManPagesAreCleanRoff) {
  ASSERT_EQ(Run({"man", folder_.path()}).exit_code, 0);
  const std::string page = folder_ / "denoise-generate.1";
  EXPECT_THAT(*ReadFile(page), StartsWith(".TH \"DENOISE\\-GENERATE\" 1"));
  EXPECT_THAT(Run({"man", folder_ / "absent"}).err, HasSubstr("absent"));
  const std::string groff =
      "command -v groff >/dev/null || exit 99; exec groff -man -Tutf8 -ww -Wbreak \"$1\"";
  const auto rendered = RunProcess({"/bin/sh", "-c", groff, "sh", page});
  if (rendered.exit_code == 99) GTEST_SKIP() << "groff is missing";
  EXPECT_EQ(rendered.exit_code, 0);
  EXPECT_EQ(rendered.err, "");
  EXPECT_THAT(rendered.out, HasSubstr("denoise generate \"a red apple\""));
}

/// The script in a shell of its own. `program` prints what a person would see.
class ScriptTest : public ShellTest {
 protected:
  ProcessResult InShell(const std::string& shell, const std::string& program) const {
    folder_.Write("script", Run({"completion", shell}).out);
    std::filesystem::create_directories(folder_ / "bin");
    std::error_code ignored;
    std::filesystem::create_symlink(DENOISE_BINARY, folder_ / "bin/denoise", ignored);
    return RunProcess(
        {"/bin/sh", "-c",
         "command -v \"$1\" >/dev/null || exit 99; cd \"$2\" && exec \"$1\" -c \"$3\"", "sh", shell,
         folder_.path(), program},
        {"XDG_CONFIG_HOME=" + folder_.path(), "HOME=" + folder_.path(),
         "PATH=" + folder_ / "bin" + ":/usr/bin:/bin"});
  }
};

/// Words as bash itself splits them: at =, : and @ too.
TEST_F(ScriptTest, Bash) {
  const auto result = InShell("bash", R"(
    . ./script
    try() {
      COMP_LINE=$1; shift
      COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() { :; }; _denoise; echo "${COMPREPLY[*]}"
    }
    try "denoise gen" denoise gen
    try "denoise generate --schedule=k" denoise generate --schedule = k
    try "denoise generate --priority=" denoise generate --priority =
    try "denoise generate --out scri" denoise generate --out scri
    try "denoise generate --out=scri" denoise generate --out = scri
    try "denoise --server 127.0.0.1:1 gen" denoise --server 127.0.0.1 : 1 gen
    try "denoise --server [::1]:1 gen" denoise --server [ :: 1] : 1 gen
    try "denoise --server=127.0.0.1:1 generate --schedule k" \
        denoise --server = 127.0.0.1 : 1 generate --schedule k
    try "denoise models load digits@1 --keep" denoise models load digits @ 1 --keep
    try "denoise  models  un" denoise models un
    complete -p denoise)");
  EXPECT_EQ(
      result.out,
      "generate\nkarras\ninteractive normal batch\nscript\nscript\ngenerate\ngenerate\nkarras\n"
      "--keep-current\nunload\ncomplete -F _denoise denoise\n")
      << result.err;
}

TEST_F(ScriptTest, BashQuotesWhatItInserts) {
  const auto result = InShell("bash", R"script(
    . ./script
    denoise() { printf '%s\n' 'two words' '$(touch hit)' "it's" plain-1.0/x; }
    COMP_LINE="denoise x"; COMP_WORDS=(denoise x); COMP_CWORD=1; _denoise
    printf '%s\n' "${COMPREPLY[@]}")script");
  EXPECT_EQ(result.out, "two\\ words\n\\$\\(touch\\ hit\\)\nit\\'s\nplain-1.0/x\n") << result.err;
}

/// The models of a server whose address has a colon.
TEST_F(ScriptTest, BashAsksTheServerOfTheLine) {
  const size_t colon = server_.address().find(':');
  const std::string host = server_.address().substr(0, colon);
  const std::string port = server_.address().substr(colon + 1);
  const auto result = InShell("bash", R"(
    . ./script
    COMP_LINE="denoise --server )" + server_.address() +
                                          R"( generate -m d"
    COMP_WORDS=(denoise --server )" + host +
                                          " : " + port + R"( generate -m d); COMP_CWORD=7
    _denoise; echo "${COMPREPLY[*]}")");
  EXPECT_EQ(result.out, "digits\n") << result.err;
}

TEST_F(ScriptTest, Zsh) {
  const auto result = InShell("zsh", R"(
    compdef() { echo "compdef $*"; }
    . ./script
    _describe() { print -l -- "${(@)candidates}"; }
    _files() { echo files; }
    words=(denoise completion ""); CURRENT=3; _denoise
    words=(denoise generate --out ""); CURRENT=4; _denoise)");
  if (result.exit_code == 99) GTEST_SKIP() << "zsh is missing";
  EXPECT_EQ(result.out, "compdef _denoise denoise\nbash:\nzsh:\nfish:\nfiles\n") << result.err;
}

TEST_F(ScriptTest, Fish) {
  const auto result = InShell("fish", R"(
    source ./script
    complete -C "denoise gen"
    complete -C "denoise context "
    complete -C "denoise generate --out scr")");
  if (result.exit_code == 99) GTEST_SKIP() << "fish is missing";
  EXPECT_THAT(result.out, HasSubstr("generate\tGenerate images\n")) << result.err;
  EXPECT_THAT(result.out, HasSubstr("remove\tRemove a context\n"));
  EXPECT_THAT(result.out, HasSubstr("script"));
}

}  // namespace
}  // namespace denoised::command
