#include "model/chat/chat_template.h"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "gtest/gtest.h"
#include "runtime/core/file.h"

namespace lockstep {
namespace {

absl::StatusOr<std::string> RenderText(const std::string& source, const OrderedJson& input,
                                       const RenderOptions& options = {}) {
  LOCKSTEP_ASSIGN_OR_RETURN(const auto chat_template, ChatTemplate::Parse(source, "test"));
  return chat_template->Render(input, options);
}

absl::StatusOr<std::string> RenderText(const std::string& source) {
  return RenderText(source, OrderedJson::object());
}

OrderedJson ReadJson(const std::string& path) {
  const auto text = ReadFile(path);
  EXPECT_TRUE(text.ok()) << text.status();
  const auto json = ParseOrderedJson(*text, path);
  EXPECT_TRUE(json.ok()) << json.status();
  return *json;
}

// A case of a fixture: `text`, or `error`; where the template itself raised, the message must be
// the same.
bool Agrees(const OrderedJson& expected, const absl::StatusOr<std::string>& got, bool raised) {
  if (expected.contains("text")) return got.ok() && *got == expected["text"];
  if (got.ok()) return false;
  const bool aborted = got.status().code() == absl::StatusCode::kAborted;
  if (!raised) return !aborted;
  return aborted && got.status().message() == expected["error"].get<std::string>();
}

std::string Describe(const absl::StatusOr<std::string>& got) {
  return got.ok() ? OrderedJson(*got).dump() : got.status().ToString();
}

// A letter repeated, and a part that differs from it in one place: a naive search compares 10^11
// bytes for each.
TEST(ChatTemplateTest, SearchesTakeLinearTime) {
  const std::string half(500000, 'a');
  const OrderedJson input = {
      {"t", half + half}, {"p", half + "b" + half.substr(1)}, {"q", half.substr(1) + "b" + half}};
  const auto begin = std::chrono::steady_clock::now();
  const auto text = RenderText(
      "{{ p in t }} {{ q in t }} {{ t.find(p) }} {{ t.rfind(q) }} {{ t.count(p) }} "
      "{{ t.replace(p, 'x') == t }} {{ t.split(p) | length }} {{ t.rsplit(q) | length }} "
      "{{ t.partition(p)[0] == t }} {{ t.rpartition(q)[2] == t }}",
      input);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(*text, "False False -1 -1 0 True 1 1 True True");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST(ChatTemplateTest, SplitsFromTheRight) {
  const auto render = [](const std::string& source) { return *RenderText(source); };
  EXPECT_EQ(render("{{ 'aaa'.rsplit('aa') }}"), "['a', '']");
  EXPECT_EQ(render("{{ 'aaa'.split('aa') }}"), "['', 'a']");
  EXPECT_EQ(render("{{ 'é, ü, x'.rsplit(', ', 1) }}"), "['é, ü', 'x']");
  EXPECT_EQ(render("{{ 'é<|>ü<|>x<|>'.rsplit('<|>') }}"), "['é', 'ü', 'x', '']");
}

// What Python 3 gives.
TEST(ChatTemplateTest, IntsAreRoundedAsInts) {
  const auto render = [](const std::string& value, const std::string& digits) {
    const auto text = RenderText("{{ (" + value + ") | round(" + digits + ") }}");
    return text.ok() ? *text : text.status().ToString();
  };
  EXPECT_EQ(render("1234567890123456789", "-1"), "1234567890123456790");
  EXPECT_EQ(render("9007199254740993000", "-2"), "9007199254740993000");
  EXPECT_EQ(render("25", "-1"), "20");
  EXPECT_EQ(render("35", "-1"), "40");
  EXPECT_EQ(render("-25", "-1"), "-20");
  EXPECT_EQ(render("-26", "-1"), "-30");
  EXPECT_EQ(render("5", "-1"), "0");
  EXPECT_EQ(render("6", "-1"), "10");
  EXPECT_EQ(render("true", "-1"), "0");
  EXPECT_EQ(render("7", "-2000000000000"), "0");
  EXPECT_EQ(render("170141183460469231731687303715884105727", "-37"),
            "170000000000000000000000000000000000000");
  EXPECT_EQ(render("170141183460469231731687303715884105727", "-39"), "0");
  EXPECT_NE(render("170141183460469231731687303715884105727", "-38").find("too wide"),
            std::string::npos);
}

TEST(ChatTemplateTest, SnippetsRenderAsJinjaRendersThem) {
  const OrderedJson fixture = ReadJson(LOCKSTEP_SOURCE_DIR "/tests/data/chat/snippets.json");
  size_t runs = 0;
  for (const OrderedJson& t : fixture["templates"]) {
    for (const OrderedJson& run : t["runs"]) {
      const auto got =
          RenderText(t["template"], run.contains("input") ? run["input"] : fixture["input"]);
      EXPECT_TRUE(Agrees(run, got, run.contains("raised")))
          << "template " << t["template"].dump() << "\n  run  " << run.dump() << "\n  got  "
          << Describe(got);
      ++runs;
    }
  }
  EXPECT_GT(runs, 400U);
}

std::string SharedDir() {
  const char* dir = std::getenv("LOCKSTEP_SHARED");
  return dir != nullptr ? dir : LOCKSTEP_SOURCE_DIR "/../shared";
}

TEST(ChatTemplateTest, PublishedTemplatesRenderAsTheReference) {
  const std::string path = SharedDir() + "/tokenizers/chat_templates.json";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no " << path << " (set LOCKSTEP_SHARED)";
  const OrderedJson templates = ReadJson(path);
  ASSERT_FALSE(templates.empty());
  for (const auto& [name, entry] : templates.items()) {
    for (const OrderedJson& c : entry["cases"]) {
      OrderedJson input = c["input"];
      for (const char* token : {"bos_token", "eos_token"}) {
        if (entry[token].is_string()) input[token] = entry[token];
      }
      const auto got = RenderText(entry["template"], input);
      const bool raised = got.status().code() == absl::StatusCode::kAborted;
      EXPECT_TRUE(Agrees(c, got, raised))
          << name << ": " << c.dump() << "\n  got " << Describe(got);
    }
  }
}

struct Refusal {
  const char* source;
  absl::StatusCode code;
  const char* message;  // a part of it
};

TEST(ChatTemplateTest, ParseRefusesByLineAndName) {
  const Refusal refusals[] = {
      {"a\nb\n{% if x %}\n", absl::StatusCode::kInvalidArgument,
       "line 3: unexpected end of the template, the tag 'if'"},
      {"\n\n{{ 1 + }}", absl::StatusCode::kInvalidArgument,
       "line 3: unexpected '}}', expected an expression"},
      {"{{ a b }}", absl::StatusCode::kInvalidArgument, "unexpected 'b', expected '}}'"},
      {"{% include 'x' %}", absl::StatusCode::kUnimplemented, "'include'"},
      {"{% import 'x' as y %}", absl::StatusCode::kUnimplemented, "'import'"},
      {"{% extends 'x' %}", absl::StatusCode::kUnimplemented, "'extends'"},
      {"\n{% shout %}", absl::StatusCode::kUnimplemented, "line 2: unknown tag 'shout'"},
      {"{{ 1 | shout }}", absl::StatusCode::kUnimplemented, "filter 'shout'"},
      {"{{ [1] | map('shout') }}", absl::StatusCode::kUnimplemented, "filter 'shout'"},
      {"{{ [1] | selectattr('x', 'shouted') }}", absl::StatusCode::kUnimplemented,
       "test 'shouted'"},
      {"{{ 1 is shouted }}", absl::StatusCode::kUnimplemented, "test 'shouted'"},
      {"{{ shout(1) }}", absl::StatusCode::kUnimplemented, "function 'shout'"},
      {"{{ 'a'.shout() }}", absl::StatusCode::kUnimplemented, "method 'shout'"},
      {"{% for x in y recursive %}{% endfor %}", absl::StatusCode::kUnimplemented, "recursive"},
  };
  for (const Refusal& r : refusals) {
    const auto parsed = ChatTemplate::Parse(r.source, "MODEL");
    ASSERT_FALSE(parsed.ok()) << r.source;
    EXPECT_EQ(parsed.status().code(), r.code) << parsed.status();
    EXPECT_NE(std::string(parsed.status().message()).find(r.message), std::string::npos)
        << parsed.status();
    EXPECT_NE(std::string(parsed.status().message()).find("MODEL"), std::string::npos)
        << parsed.status();
  }
}

TEST(ChatTemplateTest, AFunctionThatIsTestedForMayBeAbsent) {
  EXPECT_EQ(*RenderText("{% if shout is defined %}{{ shout(1) }}{% endif %}ok"), "ok");
}

TEST(ChatTemplateTest, FailuresNameLineAndReason) {
  const auto got = RenderText("a\n{{ messages[0].role.x }}", {{"messages", {{{"role", nullptr}}}}});
  EXPECT_TRUE(got.ok());
  const auto failed =
      RenderText("a\n\n{{ messages[0].nope.x }}", {{"messages", {{{"role", "user"}}}}});
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(failed.status().message(),
            "chat template of test, line 3: 'dict object' has no attribute 'nope'");
}

TEST(ChatTemplateTest, RaisedMessageIsPassedOnAlone) {
  const auto got = RenderText("x{{ raise_exception('roles must alternate') }}");
  EXPECT_EQ(got.status(), absl::AbortedError("roles must alternate"));
}

TEST(ChatTemplateTest, StrftimeNowTakesTheGivenTime) {
  RenderOptions options;
  options.now =
      std::chrono::system_clock::time_point(std::chrono::seconds(1722470400));  // 2024-08-01, UTC
  setenv("TZ", "UTC", 1);
  tzset();
  EXPECT_EQ(
      *RenderText("{{ strftime_now('%d %b %Y|%-d|%%|%Z|%f') }}", OrderedJson::object(), options),
      "01 Aug 2024|1|%||000000");
}

// Templates are not trusted: each of these must end by a limit, quickly and in bounded memory.
// (Smaller limits than the default, so that the test is quick, too.)
TEST(ChatTemplateTest, HostileTemplatesEndByALimit) {
  const std::string loop = "{% for i in range(99999) %}";
  const std::string end = "{% endfor %}";
  std::string brackets(100000, '(');
  std::string sum = "{{ 1";
  for (int i = 0; i < 10000; ++i) sum += "+1";
  std::string nested_ifs;
  for (int i = 0; i < 10000; ++i) nested_ifs += "{% if true %}";
  const std::string sources[] = {
      loop + loop + loop + "{{ i }}" + end + end + end,
      loop + loop + loop + end + end + end,
      "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}" + loop + "{% set ns.x = ns.x + ns.x %}" +
          end,
      "{{ 'a' * 99999999999 }}",
      "{{ 'a' * 99999 * 99999 }}",
      "{{ [0] * 9999999999 }}",
      "{{ '%999999999d' % 1 }}",
      "{{ '{:999999999}'.format(1) }}",
      "{{ 'a'.center(99999999999) }}",
      "{{ 2 ** 99999999 }}",
      "{{ 99999999 ** 99999999 }}",
      "{{ range(99999999999) }}",
      "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
      "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
      "{% set ns = namespace(x=[]) %}" + loop + "{% set ns.x = [ns.x] %}" + end,
      "{% set ns = namespace(x=[]) %}" + loop + "{% set ns.x = ns.x | map('upper') %}" + end,
      "{% set ns = namespace(x=[]) %}" + loop +
          "{% for y in [ns.x] %}{% set ns.x = loop %}{% endfor %}" + end,
      "{% set ns = namespace(x='ab') %}" + loop + "{% set ns.x = ns.x.replace('', ns.x) %}" + end,
      "{{ ('a' * 9999999) | list | map('replace', '', 'b' * 999) | list }}",
      "{{ [1, 2] | tojson(indent='x' * 99999999) | tojson(indent='y' * 99999999) }}" + loop + loop +
          end + end,
      "{{ ('a ' * 9999999).rsplit() }}",
      "{% set x = range(99999) | list %}" + loop + "{{ x == x }}{{ x < x }}{{ x in [x] }}" + end,
      "{% set x = 'ab' * 99999 %}{% set y = 'ab' * 99999 %}" + loop + "{% if x == y %}{% endif %}" +
          end,
      "{{ " + brackets + " }}",
      "{{ " + std::string(100000, '-') + "1 }}",
      sum + " }}",
      nested_ifs,
      "{% set " + brackets + " = 1 %}",
      "{{ x" + std::string(100000, '[') + " }}",
  };
  RenderOptions options;
  options.limits.max_steps = 500'000;
  options.limits.max_allocated_bytes = 32 << 20;
  for (const std::string& source : sources) {
    const auto got = RenderText(source, OrderedJson::object(), options);
    EXPECT_FALSE(got.ok()) << source.substr(0, 100);
  }
}

TEST(ChatTemplateTest, CyclesThroughNamespacesAreFreed) {
  const auto got = RenderText(
      "{% set ns = namespace() %}{% set ns.self = ns %}{% set ns.tail = ns %}"
      "{% for i in range(50000) %}{% set t = ns.tail %}{% set t.next = namespace() %}{% set "
      "ns.tail = t.next %}"
      "{% endfor %}"
      "{% for i in [1, 2] %}{% macro m() %}{{ i }}{% endmacro %}{% set ns.m = m %}{% set ns.loop = "
      "loop %}{% endfor %}"
      "{{ ns.m() }}{{ ns.loop.index }}{{ ns.loop.last }}");
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(*got, "22True");
}

TEST(ChatTemplateTest, LimitsAreNamed) {
  RenderOptions options;
  options.limits.max_output_bytes = 10;
  const auto long_text = RenderText("{{ 'a' * 11 }}", OrderedJson::object(), options);
  EXPECT_EQ(long_text.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(long_text.status().message()).find("max_output_bytes"), std::string::npos);
  EXPECT_TRUE(RenderText("{{ 'a' * 10 }}", OrderedJson::object(), options).ok());
  options.limits.max_steps = 100;
  const auto many_steps =
      RenderText("{% for i in range(200) %}{% endfor %}", OrderedJson::object(), options);
  EXPECT_NE(std::string(many_steps.status().message()).find("max_steps"), std::string::npos);
}

TEST(ChatTemplateTest, InputMustBeAnObject) {
  EXPECT_FALSE(RenderText("x", OrderedJson::array()).ok());
}

}  // namespace
}  // namespace lockstep
