#include "launch/bench/serve_report.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

LoadRecord Answered(double sent, std::vector<double> arrivals, int64_t tokens) {
  LoadRecord record;
  record.status = 200;
  record.sent = sent;
  record.last_event = arrivals.back();
  record.end = arrivals.back();
  record.arrivals = std::move(arrivals);
  record.prompt_tokens = 10;
  record.completion_tokens = tokens;
  return record;
}

TEST(MeasureRequest, ByHand) {
  const ServedRequest one = MeasureRequest(Answered(1, {1.5, 1.75, 2.5}, 5), 9);
  EXPECT_DOUBLE_EQ(one.ttft, 500);
  EXPECT_EQ(one.itl, (std::vector<double>{250, 750}));
  EXPECT_DOUBLE_EQ(one.e2el, 1500);
  EXPECT_DOUBLE_EQ(*one.tpot, 250);  // 1000 ms for 4 tokens
  EXPECT_EQ(one.input_tokens, 10);
  EXPECT_EQ(one.output_tokens, 5);
}

TEST(MeasureRequest, WithoutUsageTheEventsCount) {
  LoadRecord record = Answered(0, {1}, 0);
  record.prompt_tokens = record.completion_tokens = std::nullopt;
  const ServedRequest one = MeasureRequest(record, 9);
  EXPECT_EQ(one.input_tokens, 9);
  EXPECT_EQ(one.output_tokens, 1);
  EXPECT_FALSE(one.tpot.has_value());
  EXPECT_EQ(MeasureRequest(record, std::nullopt).input_tokens, 0);
}

struct Load {
  ServeBenchOptions options;
  ServeRun run;
  LoadResult result;

  Load() {
    options.server = *ParseBaseUrl("http://h:1");
    options.request_rate = 2;
    run.model = "m";
    run.arrivals = {0, 0.5, 1};
    run.prompt_tokens = {10, 10, 8};
    result.duration = 4;
    result.max_open = 2;
    LoadRecord failed;
    failed.error = "HTTP status 500: x";
    failed.sent = 1.25;
    failed.held = true;
    result.records = {Answered(0, {1, 2, 3}, 3), Answered(0.5, {0.75, 1.25}, 2), failed};
  }
};

TEST(ServeResult, Sums) {
  Load load;
  load.options.goodput_ms = {{"ttft", 250}, {"e2el", 750}};
  load.options.save_detailed = true;
  const OrderedJson r = ServeResult(load.options, load.run, load.result);
  EXPECT_EQ(r["completed"], 2);
  EXPECT_EQ(r["failed"], 1);
  EXPECT_EQ(r["total_input_tokens"], 20);
  EXPECT_EQ(r["total_output_tokens"], 5);
  EXPECT_EQ(r["request_throughput"], 0.5);
  EXPECT_EQ(r["request_goodput"], 0.25);  // the second meets both, exactly
  EXPECT_EQ(r["output_throughput"], 1.25);
  EXPECT_EQ(r["total_token_throughput"], 6.25);
  EXPECT_EQ(r["mean_ttft_ms"], 625);           // 1000 and 250
  EXPECT_EQ(r["mean_e2el_ms"], 1875);          // 3000 and 750
  EXPECT_EQ(r["mean_tpot_ms"], 750);           // 2000 / 2 and 500 / 1
  EXPECT_EQ(r["median_itl_ms"], 1000);         // 1000, 1000, 500
  EXPECT_EQ(r["max_output_tokens_per_s"], 2);  // 1 and 1.25 in the second second
  EXPECT_EQ(r["max_concurrent_requests"], 2);
  EXPECT_EQ(r["held_by_max_concurrency"], 1);
  EXPECT_EQ(r["send_lateness_ms"]["max"], 250);
  EXPECT_EQ(r["input_lens"], (std::vector<int64_t>{10, 10, 8}));
  EXPECT_EQ(r["output_lens"], (std::vector<int64_t>{3, 2, 0}));
  EXPECT_EQ(r["ttfts"], (std::vector<double>{1, 0.25, 0}));
  EXPECT_EQ(r["itls"][2].size(), 0u);
  EXPECT_EQ(r["errors"], (std::vector<std::string>{"", "", "HTTP status 500: x"}));
}

TEST(ServeResult, FieldsFollowTheOptions) {
  Load load;
  load.options.metrics = {"itl"};
  load.options.percentiles = {50, 99.9};
  const OrderedJson r = ServeResult(load.options, load.run, load.result);
  EXPECT_TRUE(r["request_goodput"].is_null());
  EXPECT_TRUE(r.contains("p50_itl_ms") && r.contains("p99.9_itl_ms"));
  EXPECT_FALSE(r.contains("p99_itl_ms") || r.contains("mean_ttft_ms") || r.contains("ttfts"));
  EXPECT_EQ(r["request_rate"], 2);
  EXPECT_TRUE(r["max_concurrency"].is_null());
  const std::string table = ServeTable(load.options, r);
  EXPECT_NE(table.find("Successful requests:                     2         \n"), std::string::npos)
      << table;
  EXPECT_NE(table.find("P99.9 ITL (ms):"), std::string::npos) << table;
}

TEST(ServeResult, OfFailuresAlone) {
  Load load;
  for (LoadRecord& record : load.result.records) record = load.result.records[2];
  load.options.request_rate = std::numeric_limits<double>::infinity();
  const OrderedJson r = ServeResult(load.options, load.run, load.result);
  EXPECT_EQ(r["completed"], 0);
  EXPECT_EQ(r["failed"], 3);
  EXPECT_EQ(r["request_rate"], "inf");
  EXPECT_TRUE(r["mean_ttft_ms"].is_null());
  EXPECT_EQ(r["output_throughput"], 0);
  EXPECT_NE(ServeTable(load.options, r).find("Mean TTFT (ms):                          -"),
            std::string::npos);
}

TEST(BaseUrl, Forms) {
  const auto parsed = [](const std::string& text) {
    const absl::StatusOr<BaseUrl> url = ParseBaseUrl(text);
    return url.ok() ? absl::StrCat(url->host, "|", url->port, "|", url->path, "|", url->origin)
                    : "refused";
  };
  EXPECT_EQ(parsed("http://a:8000"), "a|8000||a:8000");
  EXPECT_EQ(parsed("http://a/"), "a|80||a");
  EXPECT_EQ(parsed("http://a:1/v1/"), "a|1||a:1");
  EXPECT_EQ(parsed("http://a:1/x/v1"), "a|1|/x|a:1");
  EXPECT_EQ(parsed("http://[::1]:9"), "::1|9||[::1]:9");
  EXPECT_EQ(parsed("http://[::1]"), "::1|80||[::1]");
  for (const char* bad :
       {"a:8000", "", "http://", "http://:80", "http://a:", "http://a:0", "http://a:65536",
        "http://a:x", "http://[::1", "http://a b", "ftp://a", "http://u@h:1", "http://[::1]x"}) {
    EXPECT_EQ(parsed(bad), "refused") << bad;
  }
  EXPECT_NE(ParseBaseUrl("https://a").status().message().find("https"), std::string::npos);
}

TEST(ModelList, Forms) {
  const std::vector<ListedModel> models =
      ReadModelList(R"({"data":[{"id":"a","max_model_len":64},{"id":"b"},{"x":1},3]})");
  ASSERT_EQ(models.size(), 2u);
  EXPECT_EQ(models[0].id, "a");
  EXPECT_EQ(models[0].max_model_len, 64);
  EXPECT_FALSE(models[1].max_model_len.has_value());
  for (const char* none : {"", "x", "[]", "{}", "{\"data\":3}"}) {
    EXPECT_TRUE(ReadModelList(none).empty()) << none;
  }
}

}  // namespace
}  // namespace lockstep
