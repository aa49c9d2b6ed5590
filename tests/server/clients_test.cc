// SPDX-License-Identifier: Apache-2.0
#include "server/security/clients.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <set>
#include <thread>

#include "server/security/client_load.h"
#include "server/security/file_version.h"
#include "server/security/job_id.h"
#include "server/telemetry/log.h"
#include "tests/io/temporary_directory.h"

namespace denoised {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

class ClientsTest : public ::testing::Test {
 protected:
  ClientsTest() { log::Configure(log::Format::kText, log::Level::kError); }

  /// Writes `json` over the file. The size differs each time, as the time may not.
  std::string Write(const std::string& json) {
    return directory_.Write("clients.json", json + std::string(++writes_, '\n'));
  }
  std::string Error(const std::string& json) {
    const auto clients = Clients::Open(Write(json), 0ms);
    return clients.ok() ? "accepted" : std::string(clients.status().message());
  }

  TemporaryDirectory directory_;
  int writes_ = 0;
};

/// Token and digest as MakeToken prints them.
std::pair<std::string, std::string> MakePair(const std::string& name) {
  const std::string text = *MakeToken(name);
  std::smatch match;
  EXPECT_TRUE(std::regex_search(text, match, std::regex("(denoised_[0-9a-f]{64})\n")));
  const std::string token = match[1];
  EXPECT_TRUE(std::regex_search(text, match, std::regex("\\[\"([0-9a-f]{64})\"\\]")));
  return {token, match[1]};
}

std::string NameOf(const Clients& clients, const std::string& authorization,
                   std::vector<std::string_view> certificate = {}) {
  const auto caller = clients.Identify({authorization, std::move(certificate)});
  if (caller.ok()) return (*caller)->name;
  EXPECT_EQ(caller.status().code(), absl::StatusCode::kUnauthenticated);
  return std::string(caller.status().message());
}

TEST_F(ClientsTest, EverybodyIsWelcomeWithoutAFile) {
  const auto clients = *Clients::Open("", 0ms);
  EXPECT_EQ(NameOf(*clients, ""), "anonymous");
  EXPECT_EQ(NameOf(*clients, "Bearer whatever"), "anonymous");
  EXPECT_EQ(NameOf(*clients, "", {"studio.example.org", "other"}), "studio.example.org");
  EXPECT_FALSE((*clients->Identify({}))->admin);
  EXPECT_FALSE((*clients->Identify({.certificate = {"studio.example.org"}}))->admin);
}

/// Or all of them would be one client with a name, and find each other's jobs.
TEST_F(ClientsTest, ACertificateWhoseNameCannotBeSeenIsAnonymous) {
  const auto clients = *Clients::Open("", 0ms);
  for (const std::string_view name : {"", " ", "\t \n", "studio\n", "a\x7f", "\x01"}) {
    EXPECT_TRUE((*clients->Identify({.certificate = {name}}))->anonymous()) << name;
  }
  for (const char* name : {"Jane Doe", "spiffe://example.org/studio", "jos\u00e9@example.org"}) {
    EXPECT_EQ(NameOf(*clients, "", {name}), name);
  }
}

TEST_F(ClientsTest, EverybodyIsAnAdminOnlyWhereTheServerSaysSoAndWithoutAFile) {
  EXPECT_TRUE((*(*Clients::Open("", 0ms, true))->Identify({}))->admin);
  EXPECT_FALSE((*(*Clients::Open("", 0ms, true))->Identify({.forwarded = true}))->admin);
  const auto [studio, digest] = MakePair("studio");
  const auto clients =
      *Clients::Open(Write(R"({"studio": {"token_sha256": [")" + digest + "\"]}}"), 0ms, true);
  EXPECT_FALSE((*clients->Identify({.authorization = "Bearer " + studio}))->admin);
}

/// Or its jobs would be those of all callers without a name.
TEST_F(ClientsTest, NoClientIsNamedAnonymous) {
  EXPECT_THAT(Error(R"({"anonymous": {"certificates": ["a"]}})"), HasSubstr("choose another"));
}

TEST_F(ClientsTest, NoNameIsADirectoryItself) {
  for (const char* name : {".", ".."}) {
    EXPECT_THAT(Error(std::string("{\"") + name + R"(": {"certificates": ["a"]}})"),
                HasSubstr("but not"));
  }
  EXPECT_EQ(Error(R"({"...": {"certificates": ["a"]}})"), "accepted");
}

TEST_F(ClientsTest, IdsOfJobsAre128BitsAndNeverTheSame) {
  std::set<std::string> ids;
  std::set<char> digits;
  for (int i = 0; i < 1000; ++i) {
    const std::string id = *MakeJobId();
    EXPECT_EQ(id.size(), 32u);
    ids.insert(id);
    digits.insert(id.begin(), id.end());
  }
  EXPECT_EQ(ids.size(), 1000u);
  EXPECT_EQ(std::string(digits.begin(), digits.end()), "0123456789abcdef");
}

TEST_F(ClientsTest, KnowsWhoTheTokenBelongsTo) {
  const auto [studio, studio_digest] = MakePair("studio");
  const auto [ops, ops_digest] = MakePair("ops");
  const auto [old_ops, old_ops_digest] = MakePair("ops");
  EXPECT_NE(ops, old_ops);
  std::string upper = old_ops_digest;
  for (char& c : upper) c = static_cast<char>(std::toupper(c));
  const auto clients =
      Clients::Open(Write(R"({"studio": {"token_sha256": [")" + studio_digest +
                          R"("], "weight": 2.5, "max_streams": 3, "max_count": 4, "max_steps": 50,
                 "max_queued_requests": 2},
               "ops": {"token_sha256": [")" +
                          ops_digest + "\", \"" + upper + R"("], "admin": true}})"),
                    0ms);
  ASSERT_TRUE(clients.ok()) << clients.status().message();
  EXPECT_EQ(NameOf(**clients, "Bearer " + studio), "studio");
  EXPECT_EQ(NameOf(**clients, "Bearer " + ops), "ops");
  EXPECT_EQ(NameOf(**clients, "bearer " + ops), "ops") << "RFC 9110: the scheme has no case";
  EXPECT_EQ(NameOf(**clients, "Bearer " + old_ops), "ops");
  const auto caller = *(*clients)->Identify({.authorization = "Bearer " + studio});
  EXPECT_EQ(caller->weight, 2.5);
  EXPECT_FALSE(caller->admin);
  EXPECT_EQ(caller->limits.max_streams, 3);
  EXPECT_EQ(caller->limits.max_queued_requests, 2);
  const RequestLimits within = Within(caller->limits, {.max_steps = 20});
  EXPECT_EQ(within.max_count, 4);
  EXPECT_EQ(within.max_steps, 20);
  EXPECT_TRUE((*(*clients)->Identify({.authorization = "Bearer " + ops}))->admin);
}

// printf %s open-sesame | sha256sum
TEST_F(ClientsTest, TheDigestIsPlainSha256) {
  const auto clients = *Clients::Open(Write(R"({"studio": {"token_sha256":
                ["d7ecdf25eaf3deba0f2628771dbdd22d4138ab6cf38f91ed02a2ca0dec7c8ab7"]}})"),
                                      0ms);
  EXPECT_EQ(NameOf(*clients, "Bearer open-sesame"), "studio");
}

TEST_F(ClientsTest, RefusesWhoeverItDoesNotKnow) {
  const auto [token, digest] = MakePair("studio");
  const auto clients =
      *Clients::Open(Write(R"({"studio": {"token_sha256": [")" + digest + "\"]}}"), 0ms);
  EXPECT_THAT(NameOf(*clients, ""), HasSubstr("no bearer token"));
  EXPECT_THAT(NameOf(*clients, "Basic " + token), HasSubstr("Bearer TOKEN"));
  for (const std::string& wrong :
       {std::string("Bearer "), "Bearer " + digest, "Bearer  " + token, "Bearer " + token + " ",
        "Bearer " + token.substr(1), "Bearer " + std::string(1 << 20, 'x'),
        std::string("Bearer \0", 8) + token}) {
    EXPECT_THAT(NameOf(*clients, wrong), HasSubstr("does not know the token"));
  }
  EXPECT_THAT(NameOf(*clients, "", {"studio"}), HasSubstr("certificate"));
}

TEST_F(ClientsTest, KnowsCertificates) {
  const auto [token, digest] = MakePair("studio");
  const auto clients = *Clients::Open(Write(R"({"studio": {"token_sha256": [")" + digest + R"("]},
               "ops": {"certificates": ["a.example.org", "b.example.org"], "admin": true}})"),
                                      0ms);
  EXPECT_EQ(NameOf(*clients, "", {"other", "b.example.org"}), "ops");
  EXPECT_EQ(NameOf(*clients, "Bearer " + token, {"b.example.org"}), "studio");
  EXPECT_THAT(NameOf(*clients, "Bearer wrong", {"b.example.org"}), HasSubstr("token"));
  EXPECT_THAT(NameOf(*clients, "", {"c.example.org"}), HasSubstr("certificate"));
}

TEST_F(ClientsTest, ReadsAChangedFileAndKeepsTheFormerWhenItIsWrong) {
  const auto [first, first_digest] = MakePair("first");
  const auto [second, second_digest] = MakePair("second");
  const auto entry = [](const std::string& name, const std::string& digest) {
    return "{\"" + name + "\": {\"token_sha256\": [\"" + digest + "\"]}}";
  };
  const std::string path = Write(entry("first", first_digest));
  const auto clients = *Clients::Open(path, 0ms);
  EXPECT_EQ(NameOf(*clients, "Bearer " + first), "first");
  Write(entry("second", second_digest));
  EXPECT_EQ(NameOf(*clients, "Bearer " + second), "second");
  EXPECT_THAT(NameOf(*clients, "Bearer " + first), HasSubstr("token"));
  Write("{");
  EXPECT_EQ(NameOf(*clients, "Bearer " + second), "second");
  std::filesystem::remove(path);
  EXPECT_EQ(NameOf(*clients, "Bearer " + second), "second");
  Write(entry("first", first_digest));
  EXPECT_EQ(NameOf(*clients, "Bearer " + first), "first");
}

TEST_F(ClientsTest, ACallThatWasLetInKeepsItsCaller) {
  const auto [first, first_digest] = MakePair("first");
  const auto [second, second_digest] = MakePair("second");
  const auto entry = [](const std::string& name, const std::string& digest) {
    return "{\"" + name + "\": {\"token_sha256\": [\"" + digest + "\"]}}";
  };
  const auto clients = *Clients::Open(Write(entry("first", first_digest)), 0ms);
  const auto admitted = [&](const std::string& token) {
    return clients->IdentifyAdmitted({.authorization = token});
  };
  EXPECT_FALSE(admitted("Bearer " + second).ok());
  Write(entry("second", second_digest));
  EXPECT_THAT(NameOf(*clients, "Bearer " + first), HasSubstr("token"));
  const auto caller = admitted("Bearer " + first);  // the port checked it before the change
  ASSERT_TRUE(caller.ok()) << caller.status();
  EXPECT_EQ((*caller)->name, "first");
  EXPECT_EQ((*admitted("Bearer " + second))->name, "second");
  Write("{}");
  EXPECT_FALSE(admitted("Bearer " + first).ok()) << "of long ago";
}

/// A file that could not be read may become readable without being written again.
TEST_F(ClientsTest, AChangeOfModeIsAChangeOfTheFile) {
  const std::string path = Write("{}");
  const std::string version = FileVersion(path);
  EXPECT_EQ(FileVersion(path), version);
  std::this_thread::sleep_for(20ms);  // the file system's clock has ticks of up to 10 ms
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  EXPECT_NE(FileVersion(path), version);
}

TEST_F(ClientsTest, LooksNoMoreOftenThanItIsTold) {
  const auto [token, digest] = MakePair("studio");
  const std::string path = Write(R"({"studio": {"token_sha256": [")" + digest + "\"]}}");
  const auto clients = *Clients::Open(path, 1h);
  Write("{}");
  EXPECT_EQ(NameOf(*clients, "Bearer " + token), "studio");
}

TEST_F(ClientsTest, SaysWhatIsWrongWithTheFile) {
  const std::string digest(64, 'a');
  EXPECT_THAT(Error("[]"), HasSubstr("clients.json"));
  EXPECT_THAT(std::string(Clients::Open("/absent", 0ms).status().message()),
              HasSubstr("--clients: /absent: no such file"));
  EXPECT_THAT(Error(R"({"a b": {"token_sha256": [")" + digest + "\"]}}"), HasSubstr("a b"));
  EXPECT_THAT(Error(R"({"": {"token_sha256": [")" + digest + "\"]}}"), HasSubstr("1 to 64"));
  EXPECT_THAT(Error(R"({"a": 1})"), HasSubstr("\"a\" is not an object"));
  EXPECT_THAT(Error(R"({"a": {}})"), HasSubstr("--make-token a"));
  EXPECT_THAT(Error(R"({"a": {"token_sha256": ["secret"]}})"), HasSubstr("64 hexadecimal digits"));
  std::string wrong = digest;
  wrong[63] = 'g';
  EXPECT_THAT(Error(R"({"a": {"token_sha256": [")" + wrong + "\"]}}"),
              HasSubstr("64 hexadecimal digits"));
  EXPECT_EQ(Error(R"({"a": {"token_sha256": [")" + std::string(64, 'A') + "\"]}}"), "accepted");
  EXPECT_THAT(Error(R"({"a": {"token_sha256": ")" + digest + "\"}}"), HasSubstr("list"));
  EXPECT_THAT(Error(R"({"a": {"token_sha256": [")" + digest + R"("]}, "b": {"token_sha256": [")" +
                    digest + "\"]}}"),
              HasSubstr("another client"));
  EXPECT_THAT(Error(R"({"a": {"certificates": ["x"]}, "b": {"certificates": ["x"]}})"),
              HasSubstr("no other client"));
  const auto with = [&](const std::string& field) {
    return Error(R"({"a": {"certificates": ["x"], )" + field + "}}");
  };
  EXPECT_THAT(with("\"weight\": 0"), HasSubstr("0.01 to 100"));
  EXPECT_THAT(with("\"weight\": 1e999"), HasSubstr("clients.json"));
  EXPECT_THAT(with("\"max_streams\": -1"), HasSubstr("max_streams"));
  EXPECT_THAT(with("\"max_count\": 1.5"), HasSubstr("max_count"));
  EXPECT_THAT(with("\"admin\": \"yes\""), HasSubstr("admin"));
  EXPECT_THAT(with("\"adnim\": true"), HasSubstr("adnim"));
  EXPECT_EQ(with("\"max_count\": 2"), "accepted");
  const auto absent = Clients::Open(directory_ / "absent.json", 0ms);
  EXPECT_EQ(absent.status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ClientsTest, TokensAreForClientsWithANameAlone) {
  EXPECT_FALSE(MakeToken("").ok());
  EXPECT_FALSE(MakeToken("a b").ok());
  EXPECT_FALSE(MakeToken(std::string(65, 'a')).ok());
}

TEST(ClientLoadTest, BoundsEachClientByItself) {
  ClientLoad load(3, 0);
  const Caller studio{.name = "studio"}, small{.name = "small", .limits = {.max_streams = 1}};
  std::vector<ClientLoad::Lease> leases;
  const auto admit = [&](const Caller& caller, const std::string& peer = "ipv4:10.0.0.1:1") {
    auto lease = load.Admit(ClientLoad::kStream, caller, peer);
    if (lease.ok()) leases.push_back(*std::move(lease));
    return std::string(lease.status().message());
  };
  for (int i = 0; i < 3; ++i) EXPECT_EQ(admit(studio), "");
  EXPECT_THAT(admit(studio, "ipv4:10.0.0.2:1"), HasSubstr("client studio has 3 calls under way"));
  EXPECT_EQ(admit(small), "");
  EXPECT_THAT(admit(small), HasSubstr("may have 1"));
  leases.erase(leases.begin());
  EXPECT_EQ(admit(studio), "");
  EXPECT_NE(admit(studio), "");
  leases.clear();
  EXPECT_EQ(admit(small), "");
}

TEST(ClientLoadTest, TheQueueIsCountedByItself) {
  ClientLoad load(1, 0);
  const Caller studio{.name = "studio", .limits = {.max_queued_requests = 1}};
  auto stream = load.Admit(ClientLoad::kStream, studio, "");
  auto place = load.Admit(ClientLoad::kQueued, studio, "");
  ASSERT_TRUE(stream.ok() && place.ok());
  EXPECT_THAT(std::string(load.Admit(ClientLoad::kQueued, studio, "").status().message()),
              HasSubstr("1 requests in the queue, and may have 1"));
  *place = {};
  EXPECT_TRUE(load.Admit(ClientLoad::kQueued, studio, "").ok());
  EXPECT_FALSE(load.Admit(ClientLoad::kStream, studio, "").ok());
  EXPECT_TRUE(load.Admit(ClientLoad::kQueued, {}, "ipv4:10.0.0.1:1").ok()) << "no limit of its own";
}

TEST(ClientLoadTest, ALimitForAllCanBeLowered) {
  ClientLoad load(9, 2);
  const Caller studio{.name = "studio", .limits = {.max_queued_requests = 3}};
  const Caller small{.name = "small", .limits = {.max_queued_requests = 1}};
  std::vector<ClientLoad::Lease> leases;
  const auto admit = [&](const Caller& caller) {
    auto lease = load.Admit(ClientLoad::kQueued, caller, "");
    if (lease.ok()) leases.push_back(*std::move(lease));
    return std::string(lease.status().message());
  };
  EXPECT_EQ(admit(studio) + admit(studio) + admit(small), "");
  EXPECT_THAT(admit(studio), HasSubstr("may have 2"));
  EXPECT_THAT(admit(small), HasSubstr("may have 1"));
}

TEST(ClientLoadTest, TellsStrangersApartByTheirHost) {
  ClientLoad load(1, 1);
  for (const auto kind : {ClientLoad::kStream, ClientLoad::kQueued}) {
    const auto admit = [&](const char* peer) { return load.Admit(kind, {}, peer); };
    const auto first = admit("ipv4:10.0.0.1:1000");
    EXPECT_TRUE(first.ok());
    EXPECT_THAT(std::string(admit("ipv4:10.0.0.1:2000").status().message()),
                HasSubstr("ipv4:10.0.0.1"));
    EXPECT_TRUE(admit("ipv4:10.0.0.2:1000").ok());
    EXPECT_TRUE(admit("ipv6:%5B2001:db8::1%5D:1000").ok());
  }
}

}  // namespace
}  // namespace denoised
