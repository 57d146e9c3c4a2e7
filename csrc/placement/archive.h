// SPDX-License-Identifier: Apache-2.0
// Saving and loading of the core's state and of its calls, little-endian and without padding.
//
// A class lists its fields once, in ``template <typename A> void archive(A& a) { a(first_, second_); }``; a Writer
// appends them, a Reader fills them in the same order. A Reader trusts nothing: it throws CoreError at the end of its
// input and never allocates more than the input could fill.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/error.h"

namespace twinpool {

static_assert(std::endian::native == std::endian::little, "archives are little-endian");

namespace archives {

template <typename T>
inline constexpr bool is_plain = std::is_arithmetic_v<T> || std::is_enum_v<T>;

// A class that lists its fields.
template <typename T, typename A>
concept Listed = requires(T& value, A& archive) { value.archive(archive); };

// Containers that grow by insert: sets and maps.
template <typename T>
concept Associative = requires(T& value) {
  typename T::key_type;
  value.insert(value.end(), std::declval<typename T::value_type>());
};

}  // namespace archives

class Writer {
 public:
  explicit Writer(std::string& out)
      : out_(out) {}
  static constexpr bool reading = false;

  template <typename... T>
  void operator()(const T&... values) {
    (one(values), ...);
  }

 private:
  template <typename T>
  void one(const T& value) {
    if constexpr (archives::is_plain<T>) {
      out_.append(reinterpret_cast<const char*>(&value), sizeof value);
    } else if constexpr (archives::Listed<T, Writer>) {
      const_cast<T&>(value).archive(*this);  // NOLINT(cppcoreguidelines-pro-type-const-cast): a Writer changes nothing
    } else if constexpr (archives::Associative<T>) {
      one(static_cast<std::uint64_t>(value.size()));
      for (const auto& each : value) {
        one(each);
      }
    } else {
      sequence(value);
    }
  }
  void sequence(const std::string& value) {
    one(static_cast<std::uint64_t>(value.size()));
    out_.append(value);
  }
  template <typename T>
  void sequence(const std::vector<T>& value) {
    one(static_cast<std::uint64_t>(value.size()));
    if constexpr (archives::is_plain<T>) {
      out_.append(reinterpret_cast<const char*>(value.data()), value.size() * sizeof(T));
    } else {
      for (const T& each : value) {
        one(each);
      }
    }
  }
  template <typename T, std::size_t N>
  void sequence(const std::array<T, N>& value) {
    for (const T& each : value) {
      one(each);
    }
  }
  template <typename A, typename B>
  void sequence(const std::pair<A, B>& value) {
    one(value.first);
    one(value.second);
  }
  template <typename... T>
  void sequence(const std::tuple<T...>& value) {
    std::apply([this](const T&... each) { (one(each), ...); }, value);
  }
  template <typename T>
  void sequence(const std::optional<T>& value) {
    one(value.has_value());
    if (value) {
      one(*value);
    }
  }

  std::string& out_;
};

class Reader {
 public:
  explicit Reader(std::span<const char> in)
      : in_(in) {}
  static constexpr bool reading = true;

  template <typename... T>
  void operator()(T&... values) {
    (one(values), ...);
  }
  [[nodiscard]] bool at_end() const noexcept { return in_.empty(); }
  [[nodiscard]] std::size_t left() const noexcept { return in_.size(); }

 private:
  template <typename T>
  void one(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      const char byte = take(1)[0];
      require(byte == 0 || byte == 1, "archive: not a truth value");
      value = byte == 1;
    } else if constexpr (archives::is_plain<T>) {
      std::memcpy(&value, take(sizeof value).data(), sizeof value);
    } else if constexpr (archives::Listed<T, Reader>) {
      value.archive(*this);
    } else if constexpr (archives::Associative<T>) {
      value.clear();
      for (std::uint64_t count = length(1); count > 0; --count) {
        value.insert(value.end(), entry<T>());
      }
    } else {
      sequence(value);
    }
  }
  // Maps hold pairs with a const key, which are read as plain pairs.
  template <typename T>
  auto entry() {
    if constexpr (requires { typename T::mapped_type; }) {
      std::pair<typename T::key_type, typename T::mapped_type> pair;
      sequence(pair);
      return pair;
    } else {
      typename T::key_type key;
      one(key);
      return key;
    }
  }
  void sequence(std::string& value) {
    const auto bytes = take(length(1));
    value.assign(bytes.data(), bytes.size());
  }
  template <typename T>
  void sequence(std::vector<T>& value) {
    if constexpr (archives::is_plain<T>) {
      const auto bytes = take(length(sizeof(T)) * sizeof(T));
      value.resize(bytes.size() / sizeof(T));
      if (!bytes.empty()) {
        std::memcpy(value.data(), bytes.data(), bytes.size());
      }
    } else {
      value.clear();
      for (std::uint64_t count = length(1); count > 0; --count) {
        one(value.emplace_back());
      }
    }
  }
  template <typename T, std::size_t N>
  void sequence(std::array<T, N>& value) {
    for (T& each : value) {
      one(each);
    }
  }
  template <typename A, typename B>
  void sequence(std::pair<A, B>& value) {
    one(value.first);
    one(value.second);
  }
  template <typename... T>
  void sequence(std::tuple<T...>& value) {
    std::apply([this](T&... each) { (one(each), ...); }, value);
  }
  template <typename T>
  void sequence(std::optional<T>& value) {
    bool there = false;
    one(there);
    value.reset();
    if (there) {
      one(value.emplace());
    }
  }

  std::span<const char> take(std::size_t count) {
    require(count <= in_.size(), "archive: truncated");
    const auto bytes = in_.first(count);
    in_ = in_.subspan(count);
    return bytes;
  }
  // Each element takes at least ``least`` bytes of what is left.
  std::uint64_t length(std::size_t least) {
    std::uint64_t count = 0;
    one(count);
    require(count <= in_.size() / least, "archive: truncated");
    return count;
  }

  std::span<const char> in_;
};

}  // namespace twinpool
