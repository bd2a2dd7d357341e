#include "runtime/core/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

class FileTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string Path(const std::string& name) const { return folder_ / name; }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / absl::StrFormat("lockstep_file_test.%d", getpid());
};

TEST_F(FileTest, ReadsEveryByte) {
  const std::string bytes("a\0\r\n\xff", 5);
  std::ofstream(Path("f"), std::ios::binary) << bytes;
  EXPECT_EQ(*ReadFile(Path("f")), bytes);
}

TEST_F(FileTest, SaysWhatIsMissing) {
  const auto missing = ReadFile(Path("none"));
  EXPECT_TRUE(absl::IsNotFound(missing.status()));
  EXPECT_NE(std::string(missing.status().message()).find("none"), std::string::npos);
  EXPECT_TRUE(absl::IsFailedPrecondition(ReadFile(folder_).status()));
}

TEST_F(FileTest, FifoIsRefusedWithoutWaitingUnlessAskedFor) {
  ASSERT_EQ(mkfifo(Path("fifo").c_str(), 0600), 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(ReadFile(Path("fifo")).status()));
  std::thread writer([&] { std::ofstream(Path("fifo")) << "from a pipe"; });
  EXPECT_EQ(*ReadFile(Path("fifo"), FileKind::kAny), "from a pipe");
  writer.join();
}

}  // namespace
}  // namespace lockstep
