// The parts of `lockstep batch`; batch_test.py tests the whole.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "launch/batch/batch_exchange.h"
#include "launch/batch/batch_line.h"
#include "launch/batch/batch_output.h"
#include "launch/batch/batch_progress.h"
#include "launch/batch/batch_record.h"
#include "launch/batch/batch_writer.h"
#include "launch/batch/job_record.h"
#include "launch/batch/line_reader.h"
#include "runtime/core/json.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

class BatchTest : public testing::Test {
 protected:
  BatchTest() {
    char name[] = "/tmp/batch_test.XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~BatchTest() override { fs::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  static void Write(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }
  static std::string Read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }
  std::unique_ptr<BatchOutput> Open(const std::string& path, double seconds = 0) const {
    auto output = BatchOutput::Open(path, seconds);
    EXPECT_TRUE(output.ok()) << output.status();
    return output.ok() ? *std::move(output) : nullptr;
  }

  std::string folder_;
};

std::string RecordText(int64_t line, int status = 200) {
  return FormatRecord({.line = line,
                       .custom_id = "c\"" + std::to_string(line),
                       .status_code = status,
                       .request_id = "0f",
                       .body = status == 200 ? "{\"id\":1}" : ErrorJson(BadRequest("n is bad"))});
}

std::vector<InputLine> LinesOf(const std::string& text, int64_t max_line_bytes = 100) {
  int fds[2];
  EXPECT_EQ(pipe(fds), 0);
  EXPECT_EQ(write(fds[1], text.data(), text.size()), std::ssize(text));
  close(fds[1]);
  LineReader reader(fds[0], "pipe", max_line_bytes);
  std::vector<InputLine> lines;
  InputLine line;
  while (reader.Next(&line).value()) lines.push_back(line);
  close(fds[0]);
  return lines;
}

TEST_F(BatchTest, LinesEndAsTheyLike) {
  const auto lines = LinesOf(
      "\xEF\xBB\xBF"
      "a\r\n\n  \nb\rc\n\xEF\xBB\xBF"
      "d");
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_EQ(lines[0].text, "a");
  EXPECT_EQ(lines[0].num_bytes, 6);
  EXPECT_EQ(lines[1].text, "");
  EXPECT_TRUE(IsBlankLine(lines[2].text));
  EXPECT_EQ(lines[3].text, "b\rc");
  EXPECT_TRUE(lines[3].has_end);
  EXPECT_EQ(lines[4].text,
            "\xEF\xBB\xBF"
            "d");
  EXPECT_FALSE(lines[4].has_end);
  EXPECT_EQ(lines[4].number, 5);
  EXPECT_TRUE(LinesOf("").empty());
}

TEST_F(BatchTest, LongLinesAreCutButCounted) {
  const auto lines = LinesOf(std::string(500, 'x') + "\n" + std::string(100, 'y') + "\nz", 100);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_TRUE(lines[0].too_long);
  EXPECT_EQ(lines[0].text, std::string(100, 'x'));
  EXPECT_EQ(lines[0].num_bytes, 501);
  EXPECT_FALSE(lines[1].too_long);
  EXPECT_EQ(lines[1].text.size(), 100u);
  EXPECT_EQ(lines[2].text, "z");
}

TEST_F(BatchTest, LinesLongerThanTheBuffer) {
  const std::string path = Path("in");
  Write(path, std::string(600000, 'x') + "\n" + std::string(300000, 'y') + "\nz\n");
  const int fd = open(path.c_str(), O_RDONLY);
  LineReader reader(fd, path, 1 << 20);
  InputLine line;
  ASSERT_TRUE(reader.Next(&line).value());
  EXPECT_EQ(line.text, std::string(600000, 'x'));
  ASSERT_TRUE(reader.Next(&line).value());
  EXPECT_EQ(line.text, std::string(300000, 'y'));
  ASSERT_TRUE(reader.Next(&line).value());
  EXPECT_EQ(line.text, "z");
  EXPECT_FALSE(reader.Next(&line).value());
  close(fd);
}

BatchLine Parse(const std::string& text, const LineDefaults& defaults = {}) {
  return ParseBatchLine(text, 7, defaults);
}

TEST_F(BatchTest, BothFormsOfLines) {
  BatchLine line = Parse(
      R"({"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"z":1,"a":2}})");
  EXPECT_FALSE(line.error.has_value());
  EXPECT_EQ(line.custom_id, "a");
  EXPECT_EQ(line.path, "/v1/chat/completions");
  EXPECT_EQ(line.body, R"({"z":1,"a":2})");  // in the line's order
  line = Parse(R"({"prompt":"x","custom_id":"b"})");
  EXPECT_EQ(line.path, "/v1/completions");
  EXPECT_EQ(line.custom_id, "b");
  EXPECT_EQ(line.body, R"({"prompt":"x"})");
  line = Parse(R"({"messages":[]})");
  EXPECT_EQ(line.path, "/v1/chat/completions");
  EXPECT_FALSE(line.custom_id.has_value());
}

TEST_F(BatchTest, BadLinesKeepTheirCustomId) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"custom_id":"a"})", "neither"},
      {R"({"custom_id":"a","prompt":"x","messages":[]})", "exclude"},
      {R"({"custom_id":"a","url":"/v1/models","body":{}})", "url must be"},
      {R"({"custom_id":"a","body":{}})", "url is missing"},
      {R"({"custom_id":"a","method":"GET","url":"/v1/completions","body":{}})", "method must be"},
      {R"({"custom_id":"a","url":"/v1/completions","body":[]})", "body must be"},
      {R"({"custom_id":"a","prompt":"x","stream":true})", "stream is true"},
  };
  for (const auto& [text, message] : cases) {
    const BatchLine line = Parse(text);
    ASSERT_TRUE(line.error.has_value()) << text;
    EXPECT_EQ(line.custom_id, "a") << text;
    EXPECT_EQ(line.error->http_status, 400);
    EXPECT_NE(line.error->message.find(message), std::string::npos) << line.error->message;
  }
  for (const char* text : {"", "{", "[]", "1", "{\"prompt\":\"\xff\"}", R"({"custom_id":1})"}) {
    EXPECT_TRUE(Parse(text).error.has_value()) << text;
    EXPECT_FALSE(Parse(text).custom_id.has_value()) << text;
  }
}

TEST_F(BatchTest, DefaultsAndCounts) {
  const LineDefaults defaults{.max_tokens = 9, .seed = 5};
  Json body = Json::parse(Parse(R"({"prompt":"x"})", defaults).body);
  EXPECT_EQ(body["max_tokens"], 9);
  EXPECT_EQ(body["seed"], 5 + 7 * 1024);
  body = Json::parse(Parse(R"({"prompt":"x","max_completion_tokens":3,"seed":1})", defaults).body);
  EXPECT_FALSE(body.contains("max_tokens"));
  EXPECT_EQ(body["seed"], 1);
  EXPECT_EQ(Parse(R"({"prompt":"x","n":3})").num_choices, 3);
  EXPECT_EQ(Parse(R"({"prompt":["x","y"],"n":3})").num_choices, 6);
  EXPECT_EQ(Parse(R"({"prompt":[1,2,3]})").num_choices, 1);
  EXPECT_EQ(Parse(R"({"prompt":"x","n":18446744073709551615})").num_choices, 1);
  EXPECT_EQ(Parse(R"({"prompt":"x","n":99999})").num_choices, 1024);
}

TEST_F(BatchTest, RecordsSayWhatResumptionAsks) {
  for (const int status : {200, 400}) {
    std::string text = RecordText(12, status);
    ASSERT_TRUE(text.ends_with("\n"));
    text.pop_back();
    const Json json = Json::parse(text);
    EXPECT_EQ(json["custom_id"], "c\"12");
    EXPECT_EQ(json["error"].is_null(), status == 200);
    if (status != 200) {
      EXPECT_EQ(json["error"]["line"], 12);
      EXPECT_EQ(json["error"]["code"], "invalid_request_error");
      EXPECT_EQ(json["error"]["message"], "n is bad");
    }
    // As it was written, and as another program writes it.
    for (const std::string& form : {text, json.dump(), json.dump(2)}) {
      const auto head = ReadRecordHead(form);
      ASSERT_TRUE(head.ok()) << form;
      EXPECT_EQ(head->line, 12);
      EXPECT_EQ(head->ok, status == 200);
    }
  }
  for (const char* text :
       {"", "{}", "x", R"({"id":"batch_req_x","response":{"status_code":200}})",
        R"({"id":"batch_req_0","response":{"status_code":200}})",
        R"({"id":"batch_req_1","custom_id":"a","response":{"status_code":200)"}) {
    EXPECT_FALSE(ReadRecordHead(text).ok()) << text;
  }
}

TEST_F(BatchTest, LineSets) {
  LineSet set;
  EXPECT_FALSE(set.Contains(1));
  for (const int64_t line : {1, 64, 65, 1000}) set.Insert(line);
  for (const int64_t line : {1, 64, 65, 1000}) EXPECT_TRUE(set.Contains(line));
  for (const int64_t line : {2, 63, 66, 999, 1001, 1 << 30}) EXPECT_FALSE(set.Contains(line));
  EXPECT_EQ(set.largest(), 1000);
}

TEST_F(BatchTest, OutputIsReadAndTrimmed) {
  const std::string path = Path("out"), whole = RecordText(2) + RecordText(1, 400) + RecordText(3);
  Write(path, whole + R"({"id":"batch_req_9",)");
  {
    const auto output = Open(path);
    const auto finished = output->Read(/*retry_failed=*/false);
    ASSERT_TRUE(finished.ok());
    EXPECT_EQ(finished->num_ok, 2);
    EXPECT_EQ(finished->num_failed, 1);
    EXPECT_FALSE(finished->in_order);
    EXPECT_FALSE(finished->done.Contains(9));
    ASSERT_TRUE(output->Trim(false).ok());
    EXPECT_EQ(Read(path), whole);
    ASSERT_TRUE(output->Append(RecordText(4)).ok());
  }
  const auto output = Open(path);
  const auto finished = output->Read(/*retry_failed=*/true);
  ASSERT_TRUE(finished.ok());
  EXPECT_EQ(finished->num_retried, 1);
  EXPECT_FALSE(finished->done.Contains(1));
  chmod(path.c_str(), 0640);
  ASSERT_TRUE(output->Trim(true).ok());
  ASSERT_TRUE(output->Append(RecordText(1)).ok());
  EXPECT_EQ(Read(path), RecordText(2) + RecordText(3) + RecordText(4) + RecordText(1));
  EXPECT_EQ(fs::status(path).permissions(), fs::perms(0640));
  EXPECT_FALSE(BatchOutput::Open(path, 0).ok()) << "the new file is locked, too";
}

TEST_F(BatchTest, ForeignLinesAndDoublesAreRefused) {
  Write(Path("a"), RecordText(1) + "hello\n" + RecordText(2));
  EXPECT_NE(Open(Path("a"))->Read(false).status().message().find("line 2"), std::string::npos);
  Write(Path("b"), RecordText(1) + RecordText(1));
  EXPECT_FALSE(Open(Path("b"))->Read(false).ok());
}

TEST_F(BatchTest, OneWriterAtATime) {
  auto first = Open(Path("out"));
  const auto second = BatchOutput::Open(Path("out"), 0.1);
  ASSERT_FALSE(second.ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(second.status()));
  first = nullptr;
  EXPECT_NE(Open(Path("out")), nullptr);
}

TEST_F(BatchTest, AnOutputThatWasReplacedMeanwhileIsOpenedAnew) {
  auto first = Open(Path("out"));
  std::thread replaces([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    Write(Path("next"), RecordText(1));
    fs::rename(Path("next"), Path("out"));
    first = nullptr;
  });
  const auto second = Open(Path("out"), 20);
  replaces.join();
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(second->Read(false)->num_ok, 1);
}

TEST_F(BatchTest, WriterKeepsOrderWhereAsked) {
  for (const bool ordered : {false, true}) {
    const std::string path = Path(ordered ? "ordered" : "free");
    const auto output = Open(path);
    std::atomic<int64_t> written = 0;
    BatchWriter writer(*output, {.ordered = ordered, .fsync = FsyncPolicy::kAlways}, {},
                       {.written = [&](int64_t records, int64_t) { written += records; },
                        .failed = [] {},
                        .add_tokens = nullptr});
    writer.Add(1, true, "b\n");
    for (int i = 0; i < 1000 && !ordered && written < 1; ++i) usleep(1000);
    writer.Add(0, false, "a\n");
    writer.Add(3, true, "d\n");  // behind a gap
    ASSERT_TRUE(writer.Close().ok());
    EXPECT_EQ(Read(path).substr(0, 4), ordered ? "a\nb\n" : "b\na\n");
    EXPECT_EQ(Read(path).size(), ordered ? 4u : 6u);
    EXPECT_EQ(written, ordered ? 2 : 3);
    EXPECT_EQ(writer.counts().num_ok, ordered ? 1 : 2);
    EXPECT_EQ(writer.counts().num_failed, 1);
  }
}

TEST_F(BatchTest, WriterTellsAFullDisk) {
  const auto output = Open("/dev/full");
  std::atomic<int> failed = 0;
  BatchWriter writer(*output, {}, {},
                     {.written = [](int64_t, int64_t) { ADD_FAILURE(); },
                      .failed = [&] { ++failed; },
                      .add_tokens = nullptr});
  writer.Add(0, true, "a\n");
  writer.Add(1, true, "b\n");
  EXPECT_FALSE(writer.Close().ok());
  EXPECT_EQ(failed, 1);
  EXPECT_EQ(writer.counts().num_records(), 0);
}

TEST_F(BatchTest, ScansInput) {
  Write(Path("in"), "a\n\nb\n  \nc");
  const int fd = open(Path("in").c_str(), O_RDONLY);
  LineSet done;
  done.Insert(3);
  const auto scan = ScanInput(fd, "in", 100, done);
  ASSERT_TRUE(scan.ok());
  EXPECT_EQ(scan->num_lines, 3);
  EXPECT_EQ(scan->num_pending, 2);
  EXPECT_TRUE(scan->has_gap);
  EXPECT_EQ(ScanInput(fd, "in", 100, {})->digest, scan->digest);
  EXPECT_FALSE(ScanInput(fd, "in", 100, {})->has_gap);
  Write(Path("in"), "a\n\nbc\n  \n");
  EXPECT_NE(ScanInput(fd, "in", 100, {})->digest, scan->digest);
  close(fd);
}

TEST_F(BatchTest, ModelDigestSeesEveryFileOfTheModel) {
  Write(Path("config.json"), "{}");
  Write(Path("model.safetensors"), std::string(40 << 20, 'x'));
  const std::string digest = ModelDigest(folder_).value();
  Write(Path("out.jsonl"), "x");
  Write(Path("out.jsonl.job"), "x");
  EXPECT_EQ(ModelDigest(folder_).value(), digest);
  std::string weights(40 << 20, 'x');
  for (const size_t at : {size_t{0}, weights.size() - 1}) {
    weights[at] = 'y';
    Write(Path("model.safetensors"), weights);
    EXPECT_NE(ModelDigest(folder_).value(), digest);
    weights[at] = 'x';
  }
  Write(Path("model.safetensors"), weights);
  EXPECT_EQ(ModelDigest(folder_).value(), digest);
  Write(Path("chat_template.jinja"), "x");
  EXPECT_NE(ModelDigest(folder_).value(), digest);
  EXPECT_FALSE(ModelDigest(Path("absent.gguf")).ok());
}

TEST_F(BatchTest, JobRecordsAreComparedButForPaths) {
  JobRecord record{{{"path", "m"}, {"digest", "1"}, {"dtype", "float32"}},
                   {{"path", "in"}, {"digest", "2"}},
                   {{"temperature", 0.5}}};
  ASSERT_TRUE(WriteJobRecord(Path("out"), record).ok());
  const auto read = ReadJobRecord(Path("out"));
  ASSERT_TRUE(read.ok() && read->has_value());
  record.model["path"] = "elsewhere";
  EXPECT_TRUE(Differences(**read, record).empty());
  record.model["dtype"] = "bfloat16";
  record.input["digest"] = "3";
  record.sampling["temperature"] = nullptr;
  const auto differences = Differences(**read, record);
  ASSERT_EQ(differences.size(), 3u);
  EXPECT_EQ(differences[0], "dtype (\"bfloat16\", was \"float32\")");
  EXPECT_EQ(differences[1], "the input");
  EXPECT_EQ(differences[2], "temperature (null, was 0.5)");
  EXPECT_FALSE(ReadJobRecord(Path("absent"))->has_value());
  Write(Path("x.job"), "{}");
  EXPECT_FALSE(ReadJobRecord(Path("x")).ok());
}

TEST_F(BatchTest, ExchangesAreAnsweredOnce) {
  std::vector<int> statuses;
  const auto count = [&](int status, const std::string&, std::string) {
    statuses.push_back(status);
  };
  {
    BatchExchange exchange("/v1/completions", "{}", count);
    exchange.Respond(200, {}, "{}");
    exchange.Respond(503, {}, "{}");
  }
  { BatchExchange dropped("/v1/completions", "{}", count); }
  EXPECT_EQ(statuses, (std::vector<int>{200, 500}));
}

TEST_F(BatchTest, ProgressTexts) {
  BatchCounts counts;
  counts.num_ok = 90;
  counts.num_failed = 10;
  counts.before = 50;
  counts.num_lines = 400;
  counts.generated_tokens = 1000;
  counts.seconds = 2;
  EXPECT_EQ(BatchProgressText(counts),
            "100 of 400 lines (25%), 10 failed, 25.0 lines/s, 500 tokens/s, 12s left");
  counts.num_lines = 250000;
  EXPECT_NE(BatchProgressText(counts).find("2h46m left"), std::string::npos);
  counts.num_lines.reset();
  EXPECT_EQ(BatchProgressText(counts), "100 lines, 10 failed, 25.0 lines/s, 500 tokens/s");
  EXPECT_NE(BatchSummaryText(counts).find("ok 90, failed 10; this run: 50 lines in 2.0 s"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep
