#include "launch/bench/result_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

class ResultFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "/result-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }

  static std::string Read(const fs::path& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  int64_t NumFiles() const {
    return std::distance(fs::directory_iterator(folder_), fs::directory_iterator());
  }
  static absl::Status Save(const fs::path& path, const std::string& text) {
    absl::StatusOr<ResultFile> file = ResultFile::Create(path.string());
    return file.ok() ? file->Write(text) : file.status();
  }

  fs::path folder_;
};

TEST_F(ResultFileTest, TakesThePlaceOfAFileAndOfALinksTarget) {
  EXPECT_TRUE(Save(folder_ / "a", "one").ok());
  EXPECT_EQ(Read(folder_ / "a"), "one");
  fs::create_symlink("a", folder_ / "link");
  EXPECT_TRUE(Save(folder_ / "link", "two").ok());
  EXPECT_EQ(Read(folder_ / "a"), "two");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_EQ(NumFiles(), 2);
}

TEST_F(ResultFileTest, LeavesNothingUnfinished) {
  { EXPECT_TRUE(ResultFile::Create((folder_ / "a").string()).ok()); }
  EXPECT_EQ(NumFiles(), 0);
  std::ofstream(folder_ / "a") << "old";
  { EXPECT_TRUE(ResultFile::Create((folder_ / "a").string()).ok()); }
  EXPECT_EQ(Read(folder_ / "a"), "old");
}

TEST_F(ResultFileTest, RefusesWhatIsNoRegularFile) {
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  std::ofstream(folder_ / "file") << "old";
  for (const char* name : {"fifo", ".", "..", "file/x", "no/such/folder/x"}) {
    const absl::Status status = Save(folder_ / name, "text");
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_EQ(Save(folder_ / std::string(300, 'x'), "text").code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(NumFiles(), 2);
  EXPECT_EQ(Read(folder_ / "file"), "old");
}

}  // namespace
}  // namespace lockstep
