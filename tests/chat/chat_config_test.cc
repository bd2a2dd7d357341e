#include "model/chat/chat_config.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

// A folder of model files that lives as long as the test.
class ChatConfigTest : public testing::Test {
 protected:
  ChatConfigTest()
      : dir_(std::filesystem::temp_directory_path() /
             absl::StrFormat("lockstep_chat_%d_%s", ::getpid(),
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directories(dir_);
  }
  ~ChatConfigTest() override { std::filesystem::remove_all(dir_); }

  void Write(const std::string& name, const std::string& text) {
    std::ofstream(dir_ / name, std::ios::binary) << text;
  }
  std::string dir() const { return dir_.string(); }
  absl::StatusOr<std::string> Render(const OrderedJson& request) const {
    LOCKSTEP_ASSIGN_OR_RETURN(const ChatConfig config, LoadChatConfig(dir()));
    LOCKSTEP_ASSIGN_OR_RETURN(const auto format, ChatFormat::Create(config));
    return format->Render(request);
  }

 private:
  std::filesystem::path dir_;
};

const OrderedJson kHello = {{"messages", {{{"role", "user"}, {"content", "Hi"}}}}};

TEST_F(ChatConfigTest, SpecialTokensAreStringsOrObjects) {
  Write(
      "tokenizer_config.json",
      R"({"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "pad_token": null,
            "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}"})");
  EXPECT_EQ(*Render(kHello), "<s></s>False");
}

TEST_F(ChatConfigTest, JinjaFileWinsOverTheKey) {
  Write("tokenizer_config.json", R"({"bos_token": "<s>", "chat_template": "key"})");
  Write("chat_template.jinja", "file {{ bos_token }}\n");
  EXPECT_EQ(*Render(kHello), "file <s>");
}

TEST_F(ChatConfigTest, ALinkToNothingIsNoAbsentFile) {
  Write("tokenizer_config.json", R"({"chat_template": "key"})");
  std::filesystem::create_symlink("nowhere", dir() + "/chat_template.jinja");
  const auto status = LoadChatConfig(dir()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_NE(status.ToString().find("chat_template.jinja: is a dangling link"), std::string::npos)
      << status;
}

TEST_F(ChatConfigTest, JinjaFileAloneIsEnough) {
  Write("chat_template.jinja", "{{ messages[0].content }}");
  EXPECT_EQ(*Render(kHello), "Hi");
}

TEST_F(ChatConfigTest, NamedTemplatesAreChosenByTools) {
  Write(
      "tokenizer_config.json",
      R"({"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]})");
  EXPECT_EQ(*Render(kHello), "plain");
  OrderedJson request = kHello;
  request["tools"] = OrderedJson::array();
  EXPECT_EQ(*Render(request), "tools");
}

TEST_F(ChatConfigTest, ToolsAreKnownToTheTemplateThatWouldRenderThem) {
  const auto knows_tools = [](const std::string& chat_template, const std::string& tool_template) {
    ChatConfig config;
    config.chat_template = chat_template;
    config.tool_template = tool_template;
    return (*ChatFormat::Create(config))->knows_tools();
  };
  EXPECT_TRUE(knows_tools("{% if tools %}{{ tools | tojson }}{% endif %}", ""));
  EXPECT_TRUE(knows_tools("plain", "{{ tools }}"));
  EXPECT_FALSE(knows_tools("plain", ""));
}

TEST_F(ChatConfigTest, RequestFillsInWhatTransformersFillsIn) {
  Write("chat_template.jinja",
        "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ thinking }}");
  EXPECT_EQ(*Render(kHello), "True True True ");
  OrderedJson request = kHello;
  request["add_generation_prompt"] = false;
  request["thinking"] = "on";
  EXPECT_EQ(*Render(request), "True True False on");
}

TEST_F(ChatConfigTest, MissingTemplateIsNotFound) {
  EXPECT_EQ(LoadChatConfig(dir()).status().code(), absl::StatusCode::kNotFound);
  Write("tokenizer_config.json", R"({"bos_token": "<s>"})");
  const absl::Status status = LoadChatConfig(dir()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(std::string(status.message()).find("no chat template in " + dir()), std::string::npos);
}

TEST_F(ChatConfigTest, WrongShapesNameFileAndKey) {
  for (const char* text : {R"({"chat_template": 5})", R"({"chat_template": [5]})",
                           R"({"bos_token": 5, "chat_template": "x"})", "[]", "{"}) {
    Write("tokenizer_config.json", text);
    const absl::Status status = LoadChatConfig(dir()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text << ": " << status;
    EXPECT_NE(std::string(status.message()).find("tokenizer_config.json"), std::string::npos)
        << status;
  }
}

TEST_F(ChatConfigTest, RequestWithoutMessagesIsRefused) {
  Write("chat_template.jinja", "x");
  EXPECT_FALSE(Render(OrderedJson::object()).ok());
  EXPECT_FALSE(Render({{"messages", "Hi"}}).ok());
  EXPECT_FALSE(Render("Hi").ok());
}

}  // namespace
}  // namespace lockstep
