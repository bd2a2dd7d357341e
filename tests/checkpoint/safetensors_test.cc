#include "model/checkpoint/safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <random>

#include "model/checkpoint/safetensors_writer.h"
#include "tests/checkpoint/test_files.h"

namespace lockstep {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kFailed = absl::StatusCode::kFailedPrecondition;

class SafetensorsTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Checkpoint>> OpenBytes(const std::string& bytes) {
    WriteFile(folder_ / "model.safetensors", bytes);
    return OpenSafetensorsFolder(folder_.path());
  }
  void ExpectRefused(const std::string& bytes, const std::vector<std::string>& parts) {
    std::vector<std::string> all = parts;
    all.push_back(folder_ / "model.safetensors");
    ExpectFault(OpenBytes(bytes).status(), kInvalid, all);
  }

  TempFolder folder_;
};

// A header of one or two F32 [2] tensors with these offsets, and `data_bytes` of data.
std::string WithSpans(const std::string& a, const std::string& b, int data_bytes) {
  std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":)" + a + "}";
  if (!b.empty()) header += R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":)" + b + "}";
  return SafetensorsBytes(header + "}", std::string(data_bytes, '\0'));
}

TEST_F(SafetensorsTest, BrokenFilesAreRefusedWithPathAndReason) {
  const std::string good = WithSpans("[0,8]", "[8,16]", 16);
  ASSERT_TRUE(OpenBytes(good).ok());
  ExpectRefused("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
                {"Git LFS pointer"});
  ExpectRefused("", {"empty"});
  ExpectRefused("abc", {"3 bytes"});
  ExpectRefused(good.substr(0, good.size() - 1),
                {"short", std::to_string(good.size()), std::to_string(good.size() - 1)});
  ExpectRefused(good + "12345678", {"too long", std::to_string(good.size() + 8)});
  ExpectRefused(LittleEndian(0, 8) + good.substr(8), {"length 0"});
  ExpectRefused(LittleEndian(good.size(), 8) + good.substr(8), {"claims"});
  ExpectRefused(LittleEndian(~uint64_t{0}, 8) + good.substr(8), {"claims"});
  ExpectRefused(SafetensorsBytes("this is no JSON", ""), {"JSON"});
  ExpectRefused(SafetensorsBytes("[1, 2]", ""), {"JSON object"});
  ExpectRefused(WithSpans("[0,8]", "[4,12]", 12), {"tensor b", "overlap", "a"});
  ExpectRefused(WithSpans("[0,8]", "[12,20]", 20), {"tensor b", "belong to no tensor"});
  ExpectRefused(WithSpans("[4,12]", "", 12), {"tensor a", "belong to no tensor"});
  ExpectRefused(WithSpans("[0,12]", "", 12), {"tensor a", "[2]", "F32", "12 bytes"});
  ExpectRefused(WithSpans("[8,0]", "", 8), {"tensor a", "data_offsets"});
  ExpectRefused(WithSpans("[0,-8]", "", 8), {"tensor a", "data_offsets"});
  ExpectRefused(WithSpans("[0,8,9]", "", 8), {"tensor a", "data_offsets"});
  ExpectRefused(WithSpans("[0,1e40]", "", 8), {"tensor a", "data_offsets"});
}

TEST_F(SafetensorsTest, HeadersThatMakeNoSenseAreRefused) {
  const auto one = [](const std::string& entry) { return SafetensorsBytes(entry, "12345678"); };
  ExpectRefused(one(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})"), {"a", "-2"});
  ExpectRefused(one(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})"), {"a", "2.0"});
  ExpectRefused(
      one(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})"),
      {"a", "overflows"});
  ExpectRefused(one(R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,8]}})"),
                {"a", "span"});
  ExpectRefused(one(R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})"), {"a", "shape"});
  ExpectRefused(one(R"({"a":{"shape":[2],"data_offsets":[0,8]}})"), {"a", "dtype"});
  ExpectRefused(one(R"({"a":{"dtype":"F32","shape":[2]}})"), {"a", "data_offsets"});
  ExpectRefused(one(R"({"a":7})"), {"a", "object"});
  ExpectRefused(one(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                    R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})"),
                {"key a", "twice"});
  ExpectRefused(SafetensorsBytes(std::string(100000, '['), ""), {"nests deeper"});
}

TEST_F(SafetensorsTest, LongNamesAndShapesAreShownInPart) {
  const std::string name(100000, 'n');
  std::string shape = "[0";
  for (int i = 0; i < 50000; ++i) shape += ",0";
  const auto checkpoint = OpenBytes(SafetensorsBytes(
      "{\"" + name + R"(":{"dtype":"F32","shape":)" + shape + R"(],"data_offsets":[0,8]}})",
      "12345678"));
  ASSERT_FALSE(checkpoint.ok());
  EXPECT_LT(checkpoint.status().message().size(), 2000u);
}

// Quadratic work would take this test from well under a second to half a minute.
TEST_F(SafetensorsTest, FiftyThousandTensors) {
  std::string header = "{";
  for (int i = 0; i < 50000; ++i) {
    const std::string offsets = std::to_string(4 * i) + "," + std::to_string(4 * i + 4);
    header += "\"t" + std::to_string(i) + R"(":{"dtype":"F32","shape":[1],"data_offsets":[)" +
              offsets + "]},";
  }
  const std::string data(4 * 50000, '\0');
  const auto begin = std::chrono::steady_clock::now();
  const auto checkpoint = OpenBytes(SafetensorsBytes(header + R"("__metadata__":{}})", data));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->Names().size(), 50000u);
  ExpectRefused(SafetensorsBytes(header + R"("t7":{}})", data), {"key t7", "twice"});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST_F(SafetensorsTest, KeysCountAsTwiceWithinOneObjectOnly) {
  const std::string entry = R"({"dtype":"F32","shape":[1],"data_offsets":)";
  const std::string nested =
      R"({"__metadata__":{"a":"x","b":"y"},"a":)" + entry + R"([0,4]},"b":)" + entry + "[4,8]}}";
  EXPECT_TRUE(OpenBytes(SafetensorsBytes(nested, "12345678")).ok());
  ExpectRefused(SafetensorsBytes(R"({"__metadata__":{"a":"x","\u0061":"y"}})", ""),
                {"key a", "twice"});
  const std::string name(100000, 'n');
  const absl::Status status =
      OpenBytes(SafetensorsBytes("{\"" + name + "\":1,\"" + name + "\":1}", "")).status();
  ExpectFault(status, kInvalid, {"key nnn", "100000 bytes", "twice"});
  EXPECT_LT(status.message().size(), 400u);
}

TEST_F(SafetensorsTest, HeaderUpTo100MillionBytesIsLegal) {
  const std::string entry = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  std::string header = entry;
  header.resize(100'000'000, ' ');
  EXPECT_TRUE(OpenBytes(SafetensorsBytes(header, "1234")).ok());
  header.push_back(' ');
  ExpectRefused(SafetensorsBytes(header, "1234"), {"100000001", "100000000"});
}

TEST_F(SafetensorsTest, FoldersAndOddTensorsInOneFile) {
  std::filesystem::create_directory(folder_ / "model.safetensors");
  ExpectFault(OpenSafetensorsFolder(folder_.path()).status(), kInvalid,
              {folder_ / "model.safetensors", "folder"});
  std::filesystem::remove(folder_ / "model.safetensors");
  const auto checkpoint = OpenBytes(
      SafetensorsBytes(std::map<std::string, StoredTensor>{{"empty", {"F32", {0, 4}, ""}},
                                                           {"scalar", {"F32", {}, "1234"}},
                                                           {"mask", {"BOOL", {3}, "123"}},
                                                           {"new", {"X3", {3}, "12"}}}));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->Names(), (std::vector<std::string>{"empty", "mask", "new", "scalar"}));
  EXPECT_FALSE((*checkpoint)->Find("new")->readable);
  EXPECT_FALSE((*checkpoint)->Find("mask")->readable);
  EXPECT_EQ((*checkpoint)->Find("nothing"), nullptr);
  std::vector<float> out(3);
  ExpectFault((*checkpoint)->Read("mask", {0, 1}, {0, 3}, {out.data(), DType::kF32, 1, 3, 3}),
              kInvalid, {"mask", "BOOL"});
  ExpectFault((*checkpoint)->Read("nothing", {0, 1}, {0, 3}, {out.data(), DType::kF32, 1, 3, 3}),
              kNotFound, {"nothing"});
}

TEST_F(SafetensorsTest, Shards) {
  const auto shard = [](const std::string& name) {
    return SafetensorsBytes({{name, {"F32", {2}, "12345678"}}});
  };
  const auto index = [&](const std::string& weight_map) {
    WriteFile(folder_ / "model.safetensors.index.json", R"({"weight_map":)" + weight_map + "}");
    return OpenSafetensorsFolder(folder_.path()).status();
  };
  WriteFile(folder_ / "one.safetensors", shard("a"));
  WriteFile(folder_ / "two.safetensors", shard("b"));
  WriteFile(folder_ / "again.safetensors", shard("a"));
  EXPECT_TRUE(index(R"({"a":"one.safetensors","b":"two.safetensors"})").ok());
  ExpectFault(index(R"({"a":"one.safetensors","b":"three.safetensors"})"), kNotFound,
              {"index.json", "three.safetensors"});
  ExpectFault(index(R"({"a":"one.safetensors","c":"two.safetensors"})"), kInvalid,
              {"tensor c", "two.safetensors"});
  ExpectFault(index(R"({"a":"two.safetensors","b":"one.safetensors"})"), kInvalid,
              {"tensor a", "two.safetensors"});
  ExpectFault(index(R"({"a":"one.safetensors","b":"again.safetensors"})"), kInvalid,
              {"tensor a", "one.safetensors", "again.safetensors"});
  ExpectFault(index(R"({"a":"one.safetensors","a":"two.safetensors"})"), kInvalid, {"a", "twice"});
  ExpectFault(index(R"({"a":"../one.safetensors"})"), kInvalid, {"../one.safetensors"});
  ExpectFault(index(R"({"a":7})"), kInvalid, {"tensor a"});
  ExpectFault(index("[]"), kInvalid, {"weight_map"});
  ExpectFault(index("{}"), kInvalid, {"weight_map"});
  ExpectFault(index(R"({"a":)"), kInvalid, {"index.json", "JSON"});
}

float Value(int64_t row, int64_t col) {
  return static_cast<float>(std::sin(static_cast<double>(row * 1000 + col)));
}

// Every rectangle of a stored matrix, into every dtype, against conversion of the single elements.
TEST_F(SafetensorsTest, RectanglesAreConvertedNearestEven) {
  constexpr int64_t kRows = 7, kCols = 3000;  // rows far enough apart to be read one by one
  for (const DType stored : {DType::kF32, DType::kF16, DType::kBF16}) {
    std::vector<float> values(kRows * kCols);
    for (int64_t i = 0; i < kRows * kCols; ++i) values[i] = Value(i / kCols, i % kCols);
    std::string bytes(values.size() * SizeOf(stored), '\0');
    Convert(DType::kF32, values.data(), stored, bytes.data(), values.size());
    Convert(stored, bytes.data(), DType::kF32, values.data(), values.size());
    const char* name = stored == DType::kF32 ? "F32" : stored == DType::kF16 ? "F16" : "BF16";
    const auto checkpoint = OpenBytes(SafetensorsBytes(std::map<std::string, StoredTensor>{
        {"before", {"F32", {1}, "1234"}}, {"m", {name, {kRows, kCols}, bytes}}}));
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    for (const DType wanted : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const Range rows : {Range{0, kRows}, Range{2, 5}, Range{6, 7}, Range{3, 3}}) {
        for (const Range cols : {Range{0, kCols}, Range{1, 33}, Range{10, 2990}, Range{5, 5}}) {
          const int64_t stride = cols.size() + (wanted == DType::kF16 ? 3 : 0);
          std::string out(std::max<int64_t>(1, rows.size() * stride * SizeOf(wanted)), '\x55');
          const MatrixView view{out.data(), wanted, rows.size(), cols.size(), stride};
          ASSERT_TRUE((*checkpoint)->Read("m", rows, cols, view).ok());
          for (int64_t r = rows.begin; r < rows.end; ++r) {
            for (int64_t c = cols.begin; c < cols.end; ++c) {
              char expected[4] = {};
              Convert(DType::kF32, &values[r * kCols + c], wanted, expected, 1);
              const int64_t at = ((r - rows.begin) * stride + c - cols.begin) * SizeOf(wanted);
              ASSERT_EQ(out.substr(at, SizeOf(wanted)), std::string(expected, SizeOf(wanted)));
            }
          }
        }
      }
    }
  }
}

TEST_F(SafetensorsTest, FiniteOverflowOfFloat16IsReported) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {1.0f, 65504.0f, -infinity, std::nanf("")};
  std::vector<uint16_t> out(4);
  const MatrixView view{out.data(), DType::kF16, 1, 4, 4};
  const auto read = [&](const std::string& type, const std::string& bytes) {
    return (*OpenBytes(SafetensorsBytes({{"w", {type, {4}, bytes}}})))
        ->Read("w", {0, 1}, {0, 4}, view);
  };
  EXPECT_TRUE(read("F32", Bytes(values)).ok()) << "infinities stay what they are";
  EXPECT_EQ(out[1], 0x7bff);
  values[1] = -70000.0f;
  ExpectFault(read("F32", Bytes(values)), kFailed, {"tensor w", "65504", "float16"});
  const std::vector<BF16> wide = {ToBF16(1), ToBF16(1e30f), ToBF16(2), ToBF16(3)};
  ExpectFault(read("BF16", Bytes(wide)), kFailed, {"tensor w", "65504"});
}

TEST_F(SafetensorsTest, AFileCutShortAfterOpeningIsAnErrorNotASignal) {
  const std::string data(400000, 'x');
  const auto checkpoint = OpenBytes(SafetensorsBytes({{"w", {"F32", {100, 1000}, data}}}));
  ASSERT_TRUE(checkpoint.ok());
  ASSERT_EQ(truncate((folder_ / "model.safetensors").c_str(), 5000), 0);
  std::vector<float> out(100000);
  ExpectFault(
      (*checkpoint)->Read("w", {0, 100}, {0, 1000}, {out.data(), DType::kF32, 100, 1000, 1000}),
      kFailed, {"model.safetensors", "no byte 5000", "shorter now"});
}

// Whatever bytes are cut or changed: an error or a checkpoint that can be read, never a crash.
TEST_F(SafetensorsTest, RandomDamageNeverCrashes) {
  const std::string good = SafetensorsBytes(
      std::map<std::string, StoredTensor>{{"a", {"F32", {2, 3}, std::string(24, 'a')}},
                                          {"b", {"BF16", {4}, std::string(8, 'b')}},
                                          {"c", {"F16", {2, 2}, std::string(8, 'c')}}});
  std::mt19937 random(1);
  int opened = 0;
  for (int round = 0; round < 1000; ++round) {
    std::string bytes = good;
    if (round % 3 == 0) bytes.resize(random() % bytes.size());
    for (int flips = round % 4; flips > 0 && !bytes.empty(); --flips) {
      bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
    }
    const auto checkpoint = OpenBytes(bytes);
    if (!checkpoint.ok()) {
      EXPECT_FALSE(checkpoint.status().message().empty());
      continue;
    }
    ++opened;
    for (const std::string& name : (*checkpoint)->Names()) {
      const TensorInfo& info = *(*checkpoint)->Find(name);
      std::vector<float> out(info.rows() * info.cols());
      (*checkpoint)
          ->Read(name, {0, info.rows()}, {0, info.cols()},
                 {out.data(), DType::kF32, info.rows(), info.cols(), info.cols()})
          .IgnoreError();
    }
  }
  EXPECT_GT(opened, 30) << "flips in the data leave a good file";
}

TEST_F(SafetensorsTest, WriterWritesWhatTheReaderReads) {
  const std::string path = folder_ / "logits.safetensors";
  std::vector<float> row1 = {1, 2, 3}, rows23 = {4, 5, 6, 7, 8, 9};
  {
    auto writer = SafetensorsWriter::Create(path, "logits", 3, 3);
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE((*writer)->Append(row1).ok());
    EXPECT_FALSE(std::filesystem::exists(path)) << "only a whole file gets the name";
    EXPECT_EQ((*writer)->Finish().code(), absl::StatusCode::kInternal);
    ASSERT_TRUE((*writer)->Append(rows23).ok());
    ASSERT_TRUE((*writer)->Finish().ok());
  }
  const auto checkpoint = OpenSafetensors(path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->Find("logits")->stored_type, "F32");
  std::vector<float> out(9);
  ASSERT_TRUE(
      (*checkpoint)->Read("logits", {0, 3}, {0, 3}, {out.data(), DType::kF32, 3, 3, 3}).ok());
  EXPECT_EQ(out, (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST_F(SafetensorsTest, WriterLeavesNothingBehindAndReportsFaults) {
  {
    auto writer = SafetensorsWriter::Create(folder_ / "gone.safetensors", "logits", 2, 2);
    ASSERT_TRUE(writer.ok());
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
  ExpectFault(SafetensorsWriter::Create("/dev/null", "logits", 1, 1).status(), kInvalid,
              {"/dev/null", "regular"});
  ExpectFault(SafetensorsWriter::Create(folder_ / "no/such/file", "logits", 1, 1).status(), kFailed,
              {"no/such/file"});
}

}  // namespace
}  // namespace lockstep
