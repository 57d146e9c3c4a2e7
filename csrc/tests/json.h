// SPDX-License-Identifier: Apache-2.0
// As much of JSON as the golden vectors use: objects, arrays, strings without escapes, integers and null.
#pragma once

#include <cctype>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

namespace twinpool::test {

struct Json {
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json>;

  std::variant<std::nullptr_t, std::int64_t, std::string, Array, Object> value;

  [[nodiscard]] bool null() const { return std::holds_alternative<std::nullptr_t>(value); }
  [[nodiscard]] std::int64_t integer() const { return std::get<std::int64_t>(value); }
  [[nodiscard]] const std::string& text() const { return std::get<std::string>(value); }
  [[nodiscard]] const Array& array() const { return std::get<Array>(value); }
  [[nodiscard]] const Json& operator[](const std::string& key) const { return std::get<Object>(value).at(key); }
};

class JsonReader {
 public:
  static Json file(const std::string& path) {
    std::ifstream stream(path);
    if (!stream) {
      throw std::runtime_error("cannot read " + path);
    }
    JsonReader reader({std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()});
    return reader.read();
  }

 private:
  explicit JsonReader(std::string text)
      : text_(std::move(text)) {}

  char peek() {
    while (std::isspace(static_cast<unsigned char>(text_.at(at_))) != 0) {
      ++at_;
    }
    return text_.at(at_);
  }
  bool take(char wanted) {
    const bool found = peek() == wanted;
    at_ += found ? 1 : 0;
    return found;
  }
  void expect(const std::string& wanted) {
    peek();
    if (text_.compare(at_, wanted.size(), wanted) != 0) {
      throw std::runtime_error("expected " + wanted + " at " + std::to_string(at_));
    }
    at_ += wanted.size();
  }

  Json read() {
    switch (peek()) {
    case '{':
      return {read_object()};
    case '[':
      return {read_array()};
    case '"':
      return {read_text()};
    case 'n':
      expect("null");
      return {nullptr};
    default:
      return {read_integer()};
    }
  }
  Json::Object read_object() {
    Json::Object object;
    expect("{");
    while (!take('}')) {
      std::string key = read_text();
      expect(":");
      object.emplace(std::move(key), read());
      take(',');
    }
    return object;
  }
  Json::Array read_array() {
    Json::Array array;
    expect("[");
    while (!take(']')) {
      array.push_back(read());
      take(',');
    }
    return array;
  }
  std::string read_text() {
    expect("\"");
    const std::size_t end = text_.find('"', at_);
    std::string text = text_.substr(at_, end - at_);
    at_ = end + 1;
    return text;
  }
  std::int64_t read_integer() {
    std::size_t used = 0;
    const std::int64_t integer = std::stoll(text_.substr(at_, 24), &used);
    at_ += used;
    return integer;
  }

  std::string text_;
  std::size_t at_ = 0;
};

}  // namespace twinpool::test
