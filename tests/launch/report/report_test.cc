#include "launch/report/report.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "launch/report/svg_chart.h"

namespace lockstep {
namespace {

LatencyResult Latency(int ranks, int64_t batch, double prefill_ms, double step_ms) {
  LatencyResult r;
  r.num_ranks = ranks;
  r.batch_size = batch;
  r.input_len = 100;
  r.output_len = 8;
  r.device = "cpu";
  r.dtype = "float32";
  r.weights = "dummy";
  r.prefill_ms = prefill_ms;
  r.decode_step_ms = step_ms;
  return r;
}

TEST(Scaling, SpeedupAndEfficiencyAreAgainstTheSmallestN) {
  // Batch 2 has no result at N = 2: its own smallest N is 4.
  const auto rows = ScalingRows({Latency(2, 1, 40, 8), Latency(4, 1, 25, 5), Latency(8, 1, 20, 2),
                                 Latency(4, 2, 60, 6), Latency(8, 2, 40, 3)});
  ASSERT_EQ(rows.size(), 10u);
  EXPECT_EQ(rows[0].phase, "prefill");
  EXPECT_EQ(rows[0].speedup, 1);
  EXPECT_EQ(rows[0].efficiency, 1);
  EXPECT_DOUBLE_EQ(rows[0].tokens_per_second, 100 / 0.040);
  EXPECT_DOUBLE_EQ(rows[1].speedup, 1.6);
  EXPECT_DOUBLE_EQ(rows[1].efficiency, 0.8);
  EXPECT_DOUBLE_EQ(rows[2].speedup, 2);
  EXPECT_DOUBLE_EQ(rows[2].efficiency, 0.5);
  EXPECT_EQ(rows[3].base_ranks, 4);
  EXPECT_EQ(rows[4].base_ranks, 4);
  EXPECT_DOUBLE_EQ(rows[4].speedup, 1.5);
  EXPECT_DOUBLE_EQ(rows[4].efficiency, 0.75);
  EXPECT_EQ(rows[5].phase, "decode");
  EXPECT_DOUBLE_EQ(rows[7].speedup, 4);
  EXPECT_DOUBLE_EQ(rows[9].tokens_per_second, 2 / 0.003);
}

TEST(Scaling, NoDecodeOfOneToken) {
  LatencyResult one = Latency(1, 1, 5, 1);
  one.decode_step_ms.reset();
  EXPECT_EQ(ScalingRows({one}).size(), 1u);
}

TEST(Scaling, Throughput) {
  const auto rows = ThroughputRows({{2, 10, 4.0, 600, 200}, {8, 10, 2.0, 600, 200}});
  EXPECT_DOUBLE_EQ(rows[0].requests_per_second, 2.5);
  EXPECT_DOUBLE_EQ(rows[0].tokens_per_second_per_rank, 100);
  EXPECT_DOUBLE_EQ(rows[1].output_tokens_per_second, 100);
  EXPECT_DOUBLE_EQ(rows[1].speedup, 2);
  EXPECT_DOUBLE_EQ(rows[1].efficiency, 0.5);
}

std::vector<GeneratedToken> Answer(std::vector<int32_t> ids, double logprob) {
  std::vector<GeneratedToken> tokens;
  for (const int32_t id : ids) {
    tokens.push_back({id, logprob, {{id, logprob}, {99, logprob - 0.25}}});
  }
  return tokens;
}

TEST(Sameness, LogprobsCountOnlyWhileIdsAgree) {
  const GeneratedAnswers one = {1, {Answer({1, 2, 3}, -1.0), Answer({4, 5, 6}, -1.0)}};
  GeneratedAnswers two = {2, {Answer({1, 2, 3}, -1.125), Answer({4, 7, 6}, -1.0)}};
  two.answers[1][1].logprob = -9;  // of another id: no difference of the same one
  two.answers[1][2].logprob = -9;  // the same id behind another text
  const auto same = CompareAnswers({one, two});
  ASSERT_TRUE(same.ok()) << same.status();
  ASSERT_EQ(same->size(), 1u);
  const Sameness& s = (*same)[0];
  EXPECT_EQ(s.num_ranks, 2);
  EXPECT_EQ(s.base_ranks, 1);
  EXPECT_EQ(s.num_prompts, 2);
  EXPECT_EQ(s.num_same, 1);
  EXPECT_EQ(s.compared_tokens, 4);
  EXPECT_DOUBLE_EQ(s.max_logprob_difference, 0.125);
  ASSERT_EQ(s.partings.size(), 1u);
  EXPECT_EQ(s.partings[0].prompt, 1);
  EXPECT_EQ(s.partings[0].position, 1);
  EXPECT_EQ(s.partings[0].base_id, 5);
  EXPECT_EQ(s.partings[0].id, 7);
  EXPECT_DOUBLE_EQ(s.partings[0].margin.value(), 0.25);
}

TEST(Sameness, AnEndThatComesEarlierIsAParting) {
  const auto same = CompareAnswers({{1, {Answer({1, 2}, -1)}}, {4, {Answer({1}, -1)}}});
  ASSERT_TRUE(same.ok());
  ASSERT_EQ((*same)[0].partings.size(), 1u);
  EXPECT_EQ((*same)[0].partings[0].base_id, 2);
  EXPECT_FALSE((*same)[0].partings[0].id.has_value());
}

TEST(Sameness, OtherNumbersOfPromptsAreRefused) {
  EXPECT_FALSE(CompareAnswers({{1, {Answer({1}, -1)}}, {2, {}}}).ok());
  EXPECT_TRUE(CompareAnswers({{1, {Answer({1}, -1)}}})->empty());
  EXPECT_TRUE(CompareAnswers({})->empty());
}

TEST(SvgChart, EscapesAndNumbers) {
  EXPECT_EQ(EscapeHtml("<a href=\"x\">&"), "&lt;a href=&quot;x&quot;&gt;&amp;");
  EXPECT_EQ(ShortNumber(0), "0");
  EXPECT_EQ(ShortNumber(0.25), "0.25");
  EXPECT_EQ(ShortNumber(5000), "5000");
  EXPECT_EQ(ShortNumber(12345), "12.35k");
  EXPECT_EQ(ShortNumber(3.4e6), "3.4M");
  EXPECT_EQ(ShortNumber(-2e9), "-2G");
}

TEST(SvgChart, PointsLieInsideTheDrawing) {
  LineChart chart = {
      .title = "a < b", .x_label = "x", .y_label = "y", .log_x = true, .log_y = true};
  EXPECT_EQ(LineChartHtml(chart), "");
  // One point alone, and values over many powers of ten.
  for (const auto& points : {std::vector<std::pair<double, double>>{{7, 0.003}},
                             {{1, 1e-9}, {1e10, 1e9}},
                             {{3, 3}, {4, 4}}}) {
    chart.series = {{.name = "s", .points = points}};
    const std::string html = LineChartHtml(chart);
    EXPECT_EQ(html.find("nan"), std::string::npos) << html;
    EXPECT_EQ(html.find("inf"), std::string::npos) << html;
    EXPECT_NE(html.find("a &lt; b"), std::string::npos);
    size_t at = 0;
    int circles = 0;
    while ((at = html.find("<circle cx=\"", at)) != std::string::npos) {
      double x = 0, y = 0;
      ASSERT_EQ(std::sscanf(html.c_str() + at, "<circle cx=\"%lf\" cy=\"%lf\"", &x, &y), 2);
      EXPECT_TRUE(x >= 62 && x <= 436 && y >= 12 && y <= 226) << x << " " << y;
      ++circles;
      ++at;
    }
    EXPECT_EQ(circles, std::ssize(points));
  }
}

// A folder of results, made by hand.
class ReportFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "/report_" +
              ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ + "/" + name) << text;
  }
  std::string LatencyText(int ranks, const std::string& dtype = "float32") {
    const std::string statistics = "{\"median\": 4, \"min\": 3, \"max\": 5}";
    return absl::StrFormat(
        R"({"kind": "latency", "num_ranks": %d, "batch_size": 2, "input_len": 8, "output_len": 4,
            "repeats": 3, "num_threads": 1, "device": "cpu", "dtype": "%s", "weights": "dummy",
            "prefill_ms": %s, "ttft_ms": %s, "step_ms": %s, "tpot_ms": %s})",
        ranks, dtype, statistics, statistics, statistics, statistics);
  }
  std::string Error() {
    const auto data = ReadReportData(folder_);
    EXPECT_FALSE(data.ok());
    EXPECT_EQ(data.status().code(), absl::StatusCode::kInvalidArgument) << data.status();
    return std::string(data.status().message());
  }
  std::string folder_;
};

TEST_F(ReportFolder, ReadsWhatIsThere) {
  Write("latency.n2.b2.json", LatencyText(2));
  Write("latency.n1.b2.json", LatencyText(1));
  Write("notes.txt", "none of the report's");
  Write("run.json", R"({"ranks": [1, 2, 4]})");
  Write("profile.n2.b2.json", R"({"num_ranks": 2, "batch_size": 2, "profile": {"prefill": null,
    "decode": {"steps": 5, "step_ms": 3.0, "straggler": {"rank": 1, "work_ms": 2.5, "mean_work_ms": 2},
    "ranks": [{"rank": 0, "host": "a", "step_ms": 2.5, "parts_ms": {"gemm": 1.5, "wait": 1.0}},
              {"rank": 1, "host": "a", "step_ms": 3.0, "parts_ms": {"gemm": 2.5, "wait": 0.5}}]}}})");
  Write("collectives.n2.json", R"({"num_ranks": 2, "rows": [{"algorithm": "mpi", "bytes": 4096,
    "us": {"median": 8}, "algbw": 5.12e8, "busbw": 5.12e8}]})");
  absl::StatusOr<ReportData> data = ReadReportData(folder_);
  ASSERT_TRUE(data.ok()) << data.status();
  ASSERT_EQ(data->latency.size(), 2u);
  EXPECT_EQ(data->latency[0].num_ranks, 1);
  EXPECT_DOUBLE_EQ(data->latency[0].prefill_spread, 0.25);
  EXPECT_EQ(data->files.size(), 5u);
  ASSERT_EQ(data->profiles.size(), 1u);
  EXPECT_EQ(data->profiles[0].straggler, 1);
  EXPECT_EQ(SlowestRank(data->profiles[0]).rank, 1);
  const auto report = MakeReport(*std::move(data));
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(MissingRanks(*report), std::vector<int>{4});
  const OrderedJson json = ReportJson(*report);
  EXPECT_EQ(json["profile"][0]["ranks"][1]["parts_ms"]["gemm"], 2.5);
  EXPECT_EQ(json["collectives"][0]["us"], 8);
  const std::string csv = ReportCsv(*report);
  EXPECT_NE(csv.find("profile,decode,a,2,2,1,gemm,ms,2.5\n"), std::string::npos) << csv;
  EXPECT_NE(csv.find("collectives,,mpi,2,,4096,us,us,8.0\n"), std::string::npos) << csv;
  const std::string html = ReportHtml(*report);
  EXPECT_NE(html.find("Step of decode, batch 2"), std::string::npos);
  EXPECT_NE(html.find("Bus bandwidth of an all-reduce"), std::string::npos);
  EXPECT_NE(html.find("No latency result of N = 4"), std::string::npos);
}

TEST_F(ReportFolder, WhatIsWrongIsNamed) {
  EXPECT_NE(Error().find("no latency.nN.bB.json"), std::string::npos);
  Write("latency.n1.b2.json", "{");
  EXPECT_NE(Error().find("latency.n1.b2.json"), std::string::npos);
  Write("latency.n1.b2.json", R"({"kind": "throughput"})");
  EXPECT_NE(Error().find("bench latency"), std::string::npos);
  Write("latency.n1.b2.json", R"({"kind": "latency", "num_ranks": 0})");
  EXPECT_NE(Error().find("\"num_ranks\" must be there and be a whole number from 1"),
            std::string::npos);
  std::string emulated = LatencyText(1);
  emulated.insert(1, "\"emulated\": {\"tp_size\": 4, \"rank\": 0}, ");
  Write("latency.n1.b2.json", emulated);
  EXPECT_NE(Error().find("emulated rank"), std::string::npos);
  Write("latency.n1.b2.json", LatencyText(2));
  EXPECT_NE(Error().find("contents are those of a latency.n2.b2.json"), std::string::npos);
  Write("latency.n1.b2.json", LatencyText(1));
  Write("latency.n2.b2.json", LatencyText(2, "bfloat16"));
  EXPECT_NE(Error().find("different runs"), std::string::npos);
  Write("latency.n2.b2.json", LatencyText(2));
  Write("generate.n2x.jsonl", "");
  EXPECT_NE(Error().find("generate.nN.jsonl"), std::string::npos);
  std::filesystem::remove(folder_ + "/generate.n2x.jsonl");
  Write("generate.n2.jsonl", R"({"prompt_index": 1, "logprobs": []})");
  EXPECT_NE(Error().find("line 1: \"prompt_index\""), std::string::npos);
  folder_ += "/none";
  EXPECT_NE(Error().find("no such folder"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
