// SPDX-License-Identifier: Apache-2.0
#include "engine/training/exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "engine/training/nccl.h"
#include "tests/training/free_port.h"

/// NCCL's exchange against a fake library on the CPU. trainer_test.cc has the real one, on two
/// GPUs.

namespace denoised::training {

/// A communicator of the fake. What is sent waits in `world`; CommGetAsyncError() receives it.
struct NcclComm {
  int rank = 0;
  bool joined = false;
  struct {
    void* to = nullptr;
    size_t bytes = 0;
    int from = 0;
  } receive;
};

namespace {

using testing::HasSubstr;

constexpr int kRemoteError = 6, kInvalidUsage = 5;

struct World {
  std::mutex mutex;
  int ranks = 0, joined = 0, aborted = 0;
  std::map<std::pair<int, int>, std::deque<std::string>> sent;  // by (from, to)
  // What the next calls answer.
  int init_result = 0, send_result = 0, async_result = 0;
};
World* world;
thread_local int group_depth = 0;

int FakeInit(NcclComm** comm, int ranks, Nccl::UniqueId id, int rank, Nccl::Config* config) {
  std::lock_guard lock(world->mutex);
  EXPECT_EQ(std::string(id.internal), "the id of rank 0");
  EXPECT_EQ(ranks, world->ranks);
  EXPECT_EQ(config->size, 24u);
  EXPECT_EQ(config->blocking, 0);
  if (world->init_result != 0) return world->init_result;
  *comm = new NcclComm{rank};
  ++world->joined;
  return Nccl::kInProgress;
}

int FakeAsyncError(NcclComm* comm, int* error) {
  std::lock_guard lock(world->mutex);
  *error = Nccl::kInProgress;
  if (world->async_result != 0) {
    *error = world->async_result;
  } else if (!comm->joined) {
    comm->joined = world->joined == world->ranks;
  } else if (comm->receive.to == nullptr) {
    *error = Nccl::kSuccess;
  } else if (auto& waiting = world->sent[{comm->receive.from, comm->rank}]; !waiting.empty()) {
    EXPECT_EQ(waiting.front().size(), comm->receive.bytes);
    std::memcpy(comm->receive.to, waiting.front().data(), comm->receive.bytes);
    waiting.pop_front();
    comm->receive = {};
  }
  return Nccl::kSuccess;
}

int FakeAbort(NcclComm* comm) {
  std::lock_guard lock(world->mutex);
  ++world->aborted;
  delete comm;
  return Nccl::kSuccess;
}

int FakeSend(const void* from, size_t count, int type, int peer, NcclComm* comm, CUstream_st*) {
  std::lock_guard lock(world->mutex);
  EXPECT_EQ(group_depth, 1);
  EXPECT_EQ(type, Nccl::kFloat32);
  if (world->send_result != 0) return world->send_result;
  world->sent[{comm->rank, peer}].emplace_back(static_cast<const char*>(from), 4 * count);
  return Nccl::kSuccess;
}

int FakeRecv(void* to, size_t count, int, int peer, NcclComm* comm, CUstream_st*) {
  std::lock_guard lock(world->mutex);
  comm->receive = {to, 4 * count, peer};
  return Nccl::kSuccess;
}

Nccl FakeNccl() {
  Nccl nccl;
  nccl.CommInitRankConfig = FakeInit;
  nccl.CommGetAsyncError = FakeAsyncError;
  nccl.CommAbort = FakeAbort;
  nccl.GroupStart = [] { return ++group_depth, 0; };
  nccl.GroupEnd = [] { return --group_depth, int{Nccl::kInProgress}; };
  nccl.Send = FakeSend;
  nccl.Recv = FakeRecv;
  nccl.GetErrorString = [](int result) {
    return result == kRemoteError ? "remote process exited" : "invalid usage";
  };
  nccl.GetLastError = [](const NcclComm*) { return "Duplicate GPU detected"; };
  return nccl;
}

/// Calls body(rank) on a thread for each rank.
template <typename Body>
void OnRanks(int ranks, const Body& body) {
  std::vector<std::thread> threads;
  threads.reserve(ranks);
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back([&, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

using Exchanges = std::vector<std::unique_ptr<Exchange>>;

Exchanges OverTcp(int ranks, double timeout = 30) {
  const std::string address = fmt::format("127.0.0.1:{}", FreePort());
  Exchanges exchanges(ranks);
  OnRanks(ranks, [&](int rank) {
    auto exchange = ConnectExchange(rank, ranks, address, timeout);
    ASSERT_TRUE(exchange.ok()) << exchange.status();
    exchanges[rank] = *std::move(exchange);
  });
  return exchanges;
}

double SecondsSince(std::chrono::steady_clock::time_point then) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - then).count();
}

/// A socket that is connected as soon as something listens on the port.
int ConnectTo(int port) {
  const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{.sin_family = AF_INET,
                 .sin_port = htons(static_cast<uint16_t>(port)),
                 .sin_addr = {htonl(INADDR_LOOPBACK)}};
  const auto start = std::chrono::steady_clock::now();
  while (connect(client, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0 &&
         SecondsSince(start) < 30)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return client;
}

TEST(Exchange, ARankThatIsThereAlreadyIsRefused) {
  const int port = FreePort();
  OnRanks(2, [&](int rank) {
    if (rank == 0) {
      const auto status = ConnectExchange(0, 2, fmt::format("127.0.0.1:{}", port), 30).status();
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 of 2 connected"));
      return;
    }
    const int stray = ConnectTo(port);
    const uint32_t hello[] = {0x64656e31, 0, 2, 0, 0};  // as rank 0
    EXPECT_EQ(write(stray, hello, sizeof hello), ssize_t{sizeof hello});
    char byte;
    EXPECT_LE(read(stray, &byte, 1), 0);  // until it is closed
    close(stray);
  });
}

TEST(Exchange, WhatConnectsAndSaysNothingKeepsNoRankOut) {
  const int port = FreePort();
  const std::string address = fmt::format("127.0.0.1:{}", port);
  int silent = -1;
  OnRanks(2, [&](int rank) {
    if (rank == 1) silent = ConnectTo(port);
    const auto exchange = ConnectExchange(rank, 2, address, 30);
    EXPECT_TRUE(exchange.ok()) << exchange.status();
  });
  close(silent);
}

/// The system gives a socket that connects some free port, perhaps the very one that it tries.
TEST(Exchange, ASocketThatReachedItselfIsKnown) {
  const auto bound = [](sockaddr_in* address) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address->sin_family = AF_INET;
    address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof *address;
    EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(address), size), 0);
    EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(address), &size), 0);
    return fd;
  };
  sockaddr_in own{}, others{}, another{};
  const int alone = bound(&own), listener = bound(&others), dialling = bound(&another);
  ASSERT_EQ(connect(alone, reinterpret_cast<const sockaddr*>(&own), sizeof own), 0);
  EXPECT_TRUE(ReachesItself(alone));
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(connect(dialling, reinterpret_cast<const sockaddr*>(&others), sizeof others), 0);
  EXPECT_FALSE(ReachesItself(dialling));
  for (const int fd : {alone, listener, dialling}) close(fd);
}

TEST(Exchange, AllRanksHaveTheTextsOfAll) {
  const std::vector<std::string> all = {"", "b", "cc", "ddd", "eeee", "fffff", "gggggg", "hhhhhhh"};
  for (const int ranks : {2, 4, 8}) {
    for (const bool tcp : {false, true}) {
      const Exchanges exchanges = tcp ? OverTcp(ranks) : NewLoopbackExchanges(ranks);
      OnRanks(ranks, [&](int rank) {
        const auto texts = GatherTexts(all[rank], exchanges[rank]->host());
        ASSERT_TRUE(texts.ok()) << texts.status();
        EXPECT_EQ(*texts, std::vector(all.begin(), all.begin() + ranks));
      });
    }
  }
}

/// As gradients are added: each rank has numbers of its own, and all have the sum.
void ExpectSums(const Exchanges& exchanges, int steps, int64_t elements) {
  const int ranks = static_cast<int>(exchanges.size());
  OnRanks(ranks, [&](int rank) {
    Exchange& exchange = *exchanges[rank];
    EXPECT_EQ(exchange.rank(), rank);
    EXPECT_EQ(exchange.ranks(), ranks);
    const Tensor sum = Tensor::Host({elements}, DType::kF32),
                 theirs = Tensor::Host({elements}, DType::kF32);
    for (int step = 0; step < steps; ++step) {
      const auto first = [&](int64_t i) { return static_cast<float>(step + i % 1000); };
      for (int64_t i = 0; i < elements; ++i)
        sum.as<float>()[i] = first(i) + static_cast<float>(rank);
      for (int width = 1; width < ranks; width *= 2) {
        const absl::Status status = exchange.Swap(sum, theirs, rank ^ width);
        ASSERT_TRUE(status.ok()) << status;
        for (int64_t i = 0; i < elements; ++i) sum.as<float>()[i] += theirs.as<float>()[i];
      }
      for (int64_t i = 0; i < elements; ++i)
        ASSERT_EQ(sum.as<float>()[i], static_cast<float>(ranks) * first(i) +
                                          static_cast<float>(ranks * (ranks - 1) / 2));
    }
  });
}

TEST(Exchange, RanksAddUpWhatAllHave) {
  for (const int ranks : {2, 4, 8}) {
    SCOPED_TRACE(ranks);
    ExpectSums(NewLoopbackExchanges(ranks), 40, 5);
    const Exchanges tcp = OverTcp(ranks);
    ExpectSums(tcp, 40, 5);
    // 4 MB do not fit into what the system buffers, so both directions must go on together.
    ExpectSums(tcp, 2, 1'000'003);
  }
}

TEST(Exchange, RanksWaitForTheFirstBeyondTheTimeout) {
  constexpr double kTimeout = 2;
  for (const bool tcp : {false, true}) {
    const Exchanges exchanges = tcp ? OverTcp(4, kTimeout) : NewLoopbackExchanges(4);
    OnRanks(4, [&](int rank) {
      const auto start = std::chrono::steady_clock::now();
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
      const absl::Status status = exchanges[rank]->WaitForFirst();
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_GT(SecondsSince(start), kTimeout);
      // What follows is not disturbed.
      const auto texts = GatherTexts(std::to_string(rank), *exchanges[rank]);
      ASSERT_TRUE(texts.ok()) << texts.status();
      EXPECT_THAT(*texts, testing::ElementsAre("0", "1", "2", "3"));
    });
  }
}

TEST(Exchange, RanksThatWaitNoticeThatTheFirstEnds) {
  Exchanges exchanges = OverTcp(2);
  OnRanks(2, [&](int rank) {
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      exchanges[0].reset();
    } else {
      EXPECT_EQ(exchanges[1]->WaitForFirst().message(), "rank 0 has ended");
    }
  });
}

TEST(Exchange, AHostMayBecomeKnownUntilTheTimeout) {
  const auto start = std::chrono::steady_clock::now();
  const absl::Status status = ConnectExchange(1, 2, "no-such-host.invalid:29500", 0.5).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("no-such-host.invalid, is not known within 0.5 s"));
  EXPECT_GE(SecondsSince(start), 0.5);
  // Waiting does not help here.
  EXPECT_TRUE(
      absl::IsInvalidArgument(ConnectExchange(1, 2, "127.0.0.1:no-such-service", 30).status()));
}

TEST(Exchange, AMachineThatDoesNotAnswerIsLeftAtTheTimeout) {
  // Connections beyond a listener's queue get no answer.
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(bind(listener, generic, size), 0);
  ASSERT_EQ(listen(listener, 0), 0);
  ASSERT_EQ(getsockname(listener, generic, &size), 0);
  std::vector<int> waiting(4);
  for (int& fd : waiting) {
    fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    connect(fd, generic, size);
  }
  const auto start = std::chrono::steady_clock::now();
  const absl::Status status =
      ConnectExchange(1, 2, fmt::format("127.0.0.1:{}", ntohs(address.sin_port)), 0.5).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("does not answer within 0.5 s"));
  EXPECT_LT(SecondsSince(start), 20);  // connect() alone: over two minutes
  for (const int fd : waiting) close(fd);
  close(listener);
}

class NcclTest : public testing::Test {
 protected:
  void SetUp() override {
    world = &world_;
    auto backend = OpenCpuBackend();
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
  }
  absl::StatusOr<std::unique_ptr<Exchange>> Open(std::unique_ptr<Exchange> host, double timeout) {
    Nccl::UniqueId id;
    std::string_view("the id of rank 0").copy(id.internal, sizeof id.internal);
    return NewNcclExchange(FakeNccl(), id, *backend_, std::move(host), timeout);
  }
  Exchanges OpenAll(int ranks, double timeout) {
    world_.ranks = ranks;
    Exchanges exchanges = OverTcp(ranks);
    OnRanks(ranks, [&](int rank) {
      auto opened = Open(std::move(exchanges[rank]), timeout);
      ASSERT_TRUE(opened.ok()) << opened.status();
      exchanges[rank] = *std::move(opened);
    });
    return exchanges;
  }
  /// Of rank 0 with rank 1.
  static absl::Status Swap(Exchange& exchange) {
    const Tensor mine = Tensor::HostF32({3}, std::vector<float>{1, 2, 3}),
                 theirs = Tensor::Host({3}, DType::kF32);
    return exchange.Swap(mine, theirs, 1 - exchange.rank());
  }

  World world_;
  std::unique_ptr<Backend> backend_;
};

TEST_F(NcclTest, RanksAddUpWhatAllHave) {
  for (const int ranks : {2, 4, 8}) {
    world_.joined = 0;
    ExpectSums(OpenAll(ranks, 30), 40, 5);
  }
  EXPECT_EQ(world_.aborted, 2 + 4 + 8);
}

TEST_F(NcclTest, ARankThatEndsIsNamedAtOnce) {
  Exchanges exchanges = OpenAll(2, 300);
  exchanges[1].reset();
  const auto start = std::chrono::steady_clock::now();
  const absl::Status status = Swap(*exchanges[0]);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 has ended"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  EXPECT_EQ(world_.aborted, 2);
  EXPECT_THAT(std::string(Swap(*exchanges[0]).message()), HasSubstr("failed before"));
}

TEST_F(NcclTest, ARankThatHangsIsNamedAfterTheTimeout) {
  const Exchanges exchanges = OpenAll(2, 2);  // which also both ranks have to open in
  const absl::Status status = Swap(*exchanges[0]);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(status.message(), "rank 1 has exchanged nothing for 2 s");
  EXPECT_EQ(world_.aborted, 1);
}

TEST_F(NcclTest, ErrorsAreReportedWithTheRankAndNcclsWords) {
  const Exchanges exchanges = OpenAll(2, 30);
  world_.async_result = kRemoteError;
  absl::Status status = Swap(*exchanges[0]);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(status.message(),
            "exchange with rank 1: remote process exited: Duplicate GPU detected");
  world_.async_result = 0;
  world_.send_result = kInvalidUsage;
  status = Swap(*exchanges[1]);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("exchange with rank 0: ncclSend: invalid usage"));
  EXPECT_EQ(group_depth, 0);
  EXPECT_EQ(world_.aborted, 2);
}

TEST_F(NcclTest, OpeningFailsWithAReason) {
  world_.ranks = 2;
  world_.init_result = kInvalidUsage;
  Exchanges tcp = OverTcp(2);
  EXPECT_EQ(Open(std::move(tcp[0]), 30).status().message(),
            "ncclCommInitRankConfig: invalid usage: Duplicate GPU detected");
  world_.init_result = 0;
  tcp = OverTcp(2);
  EXPECT_EQ(Open(std::move(tcp[0]), 0.2).status().message(),
            "not all 2 ranks have opened NCCL within 0.2 s");
  tcp = OverTcp(2);
  tcp[1].reset();
  world_.joined = 0;
  EXPECT_EQ(Open(std::move(tcp[0]), 30).status().message(), "rank 1 has ended");
  EXPECT_EQ(world_.aborted, 2);
}

TEST(NcclLibrary, IsRefusedWithTheRemedy) {
  const absl::Status none = Nccl::Open("libnccl-that-is-not-there.so.2").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(none)) << none;
  EXPECT_THAT(std::string(none.message()), HasSubstr("libnccl-that-is-not-there.so.2"));
  EXPECT_THAT(std::string(none.message()), HasSubstr("LD_LIBRARY_PATH"));
  const absl::Status other = Nccl::Open("libm.so.6").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_THAT(std::string(other.message()), HasSubstr("libm.so.6 has no ncclGetVersion"));
}

NcclOffer OfferOf(std::string_view gpu, std::string_view obstacle = "") {
  NcclOffer offer;
  gpu.copy(offer.gpu, sizeof offer.gpu);
  obstacle.copy(offer.obstacle, sizeof offer.obstacle);
  return offer;
}

TEST(ChooseExchange, NcclNeedsAllRanksAndAGpuForEach) {
  EXPECT_EQ(Obstacle(std::vector{OfferOf("a"), OfferOf("b"), OfferOf("c"), OfferOf("d")}), "");
  EXPECT_EQ(Obstacle(std::vector{OfferOf("a"), OfferOf("b", "has no GPU")}), "rank 1 has no GPU");
  EXPECT_EQ(Obstacle(std::vector{OfferOf("a"), OfferOf("b"), OfferOf("c"), OfferOf("b")}),
            "ranks 1 and 3 share a GPU (LOCAL_RANK chooses it)");
}

TEST(ChooseExchange, AllRanksHaveAllOffers) {
  const Exchanges exchanges = NewLoopbackExchanges(8);
  OnRanks(8, [&](int rank) {
    const auto offers = GatherOffers(OfferOf(std::to_string(rank)), *exchanges[rank]);
    ASSERT_TRUE(offers.ok()) << offers.status();
    ASSERT_EQ(offers->size(), 8u);
    for (int other = 0; other < 8; ++other) EXPECT_EQ((*offers)[other].gpu, std::to_string(other));
  });
}

TEST(ChooseExchange, RanksOnCpusUseTcp) {
  const auto backend = OpenCpuBackend();
  ASSERT_TRUE(backend.ok()) << backend.status();
  const auto choose = [&](ExchangeKind first, ExchangeKind second) {
    Exchanges tcp = OverTcp(2);
    std::vector<absl::StatusOr<ChosenExchange>> chosen(2);
    OnRanks(2, [&](int rank) {
      chosen[rank] = ChooseExchange(rank == 0 ? first : second, **backend, std::move(tcp[rank]), 5);
    });
    return chosen;
  };
  using Kind = ExchangeKind;
  for (const auto& chosen : choose(Kind::kAuto, Kind::kAuto)) {
    ASSERT_TRUE(chosen.ok()) << chosen.status();
    EXPECT_EQ(chosen->description, "TCP: rank 0 has no GPU");
    EXPECT_EQ(chosen->exchange->device(), denoised::Device::kCpu);
    EXPECT_EQ(chosen->exchange->ranks(), 2);
  }
  const auto mixed = choose(Kind::kTcp, Kind::kNccl);
  ASSERT_TRUE(mixed[0].ok()) << mixed[0].status();
  EXPECT_EQ(mixed[0]->description, "TCP: rank 0 wants TCP");
  EXPECT_TRUE(absl::IsFailedPrecondition(mixed[1].status())) << mixed[1].status();
  EXPECT_EQ(mixed[1].status().message(),
            "exchange is \"nccl\", but rank 0 wants TCP; without it, use auto or tcp");
  // One rank needs no library.
  const auto alone = ChooseExchange(Kind::kNccl, **backend, NewSoleExchange(), 5);
  EXPECT_TRUE(alone.ok()) << alone.status();
}

}  // namespace
}  // namespace denoised::training
