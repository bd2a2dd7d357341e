// The parts of `lockstep supervise`: when to restart, and a port that is passed to and fro.
#include <gtest/gtest.h>
#include <poll.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "launch/openai/api_server.h"
#include "launch/supervise/outage_answers.h"
#include "launch/supervise/port_handover.h"
#include "launch/supervise/restart_policy.h"
#include "tests/launch/http_client.h"

namespace lockstep {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;

TEST(RestartPolicyTest, WaitsDoubleUpToAMinute) {
  RestartPolicy policy(9);
  for (const int expected : {1, 2, 4, 8, 16, 32, 60, 60, 60}) {
    EXPECT_EQ(policy.Next(seconds(599)), seconds(expected));
  }
  EXPECT_EQ(policy.number(), 9);
  EXPECT_EQ(policy.Next(seconds(599)), std::nullopt);
  EXPECT_EQ(RestartPolicy(0).Next({}), std::nullopt);
}

TEST(RestartPolicyTest, ASteadyServerHasAllRestartsAgain) {
  RestartPolicy policy(2);
  EXPECT_EQ(policy.Next({}), seconds(1));
  EXPECT_EQ(policy.Next({}), seconds(2));
  EXPECT_EQ(policy.Next(minutes(10)), seconds(1));
  EXPECT_EQ(policy.number(), 1);
  EXPECT_EQ(policy.Next({}), seconds(2));
  EXPECT_EQ(policy.Next({}), std::nullopt);
}

TEST(RestartPolicyTest, EndsAreNamed) {
  const auto exited = [](int status) { return status << 8; };
  EXPECT_EQ(DescribeEnd("mpirun", exited(1)), "exit status 1");
  EXPECT_EQ(DescribeEnd("mpirun", exited(128)), "exit status 128");
  EXPECT_EQ(DescribeEnd("mpirun", exited(137)), "exit status 137: a rank was ended by SIGKILL");
  EXPECT_EQ(DescribeEnd("mpirun", exited(255)), "exit status 255");
  EXPECT_EQ(DescribeEnd("mpirun", SIGTERM), "mpirun was ended by SIGTERM");
  EXPECT_EQ(ExitStatusOf(exited(137)), 137);
  EXPECT_EQ(ExitStatusOf(SIGTERM), 143);
}

// A supervisor's port, with a thread that does what its main loop does.
class PortHandoverTest : public testing::Test {
 protected:
  void SetUp() override {
    auto keeper = PortKeeper::Create(
        [this](const std::shared_ptr<HttpExchange>& exchange) { answers_.Answer(*exchange); },
        OpenAiErrorBody);
    ASSERT_TRUE(keeper.ok()) << keeper.status();
    keeper_ = *std::move(keeper);
    setenv(kSupervisorVariable, keeper_->name().c_str(), 1);
    thread_ = std::thread([this] {
      while (!stop_) {
        std::array<pollfd, 2> fds = {
            {{keeper_->listener_fd(), POLLIN, 0}, {keeper_->lease_fd(), POLLIN, 0}}};
        if (poll(fds.data(), fds.size(), 10) > 0) keeper_->OnEvents();
        is_ready_ = keeper_->is_ready();
      }
    });
  }
  void TearDown() override {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    unsetenv(kSupervisorVariable);
  }

  OutageAnswers answers_;
  std::unique_ptr<PortKeeper> keeper_;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> is_ready_ = false;
  std::thread thread_;
};

TEST_F(PortHandoverTest, ThePortStaysAndSomebodyAlwaysListens) {
  int port = 0;
  for (int round = 0; round < 5; ++round) {
    absl::StatusOr<LeasedPort> leased = TakePort("127.0.0.1", 0);
    ASSERT_TRUE(leased.ok()) << leased.status();
    if (round == 0) port = leased->listeners.port;
    EXPECT_EQ(leased->listeners.port, port);
    // Neither has a server now: the client waits for rank 0's.
    TestClient early(port);
    ASSERT_TRUE(early.connected());
    ASSERT_TRUE(early.Send(Get("/")));
    auto server = HttpServer::Create(
        std::move(leased->listeners), {},
        [](const std::shared_ptr<HttpExchange>& exchange) { exchange->Respond(200, {}, "rank 0"); },
        OpenAiErrorBody);
    ASSERT_TRUE(server.ok()) << server.status();
    EXPECT_EQ(early.ReadResponse().body, "rank 0");
    leased->lease.TellReady();
    EXPECT_TRUE(Eventually([this] { return is_ready_.load(); }));

    server->reset();
    TestClient waiting(port);
    ASSERT_TRUE(waiting.connected());
    leased->lease = PortLease();
    const TestResponse health = waiting.Ask(Get("/health"));
    EXPECT_EQ(health.status, 503);
    EXPECT_EQ(health.body, "{\"status\":\"failed\"}");
    EXPECT_EQ(health.Header("Connection"), "close");
    EXPECT_TRUE(Eventually([this] { return !is_ready_.load(); }));
    answers_.SetNextStart(OutageAnswers::Clock::now() + seconds(20));
    const TestResponse refused = TestClient(port).Ask(Post("/v1/completions", "{}"));
    EXPECT_EQ(refused.status, 503);
    EXPECT_EQ(refused.Header("Retry-After"), "25");
    EXPECT_NE(refused.body.find("\"code\":\"unavailable\""), std::string::npos) << refused.body;
  }
}

TEST_F(PortHandoverTest, WhatCannotBeGivenIsTold) {
  const auto refusal = [](const std::string& host, int port) {
    const absl::StatusOr<LeasedPort> leased = TakePort(host, port);
    return leased.ok() ? "given" : std::string(leased.status().message());
  };
  EXPECT_NE(refusal("256.1.1.1", 8000).find("256.1.1.1"), std::string::npos);
  EXPECT_EQ(refusal("127.0.0.1", 65536), "port 65536 is not in 0 to 65535");
  {
    const absl::StatusOr<LeasedPort> held = TakePort("127.0.0.1", 0);
    ASSERT_TRUE(held.ok()) << held.status();
    EXPECT_NE(refusal("127.0.0.1", 0).find("another rank 0 has it"), std::string::npos);
  }
  EXPECT_TRUE(Eventually([&] {
    return refusal("127.0.0.1", 1) ==
           "rank 0 asks `lockstep supervise` for another port than before: "
           "1 127.0.0.1, not 0 127.0.0.1";
  }));
  setenv(kSupervisorVariable, "nobody", 1);
  EXPECT_NE(refusal("127.0.0.1", 0).find("rank 0 has to run on its host"), std::string::npos);
  unsetenv(kSupervisorVariable);
  EXPECT_EQ(refusal("127.0.0.1", 0), "given");
}

}  // namespace
}  // namespace lockstep
