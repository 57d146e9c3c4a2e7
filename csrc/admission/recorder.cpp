// SPDX-License-Identifier: Apache-2.0
#include "admission/recorder.h"

#include <algorithm>
#include <utility>

namespace twinpool::admission {

namespace {

constexpr std::uint64_t k_spare_bytes = std::uint64_t{64} << 10U;  // the entry that makes a half full

std::vector<double> config_values(const AdmissionConfig& config) {
  std::vector<double> values;
  for (const std::string_view field : AdmissionConfig::fields()) {
    values.push_back(config.get(field));
  }
  return values;
}

std::vector<std::string> config_fields() {
  return {AdmissionConfig::fields().begin(), AdmissionConfig::fields().end()};
}

}  // namespace

void Recorder::start(std::uint64_t max_bytes) {
  half_bytes_ = std::max<std::uint64_t>(max_bytes / 2, 4096);
  older_ = Half{};
  on_ = true;
  new_half();
}

void Recorder::stop() {
  on_ = false;
}

void Recorder::new_half() {
  newer_ = Half{};
  newer_.limits = config_values(core_.config());
  // Strings that grow by doubling would take twice the bytes, and stop the core to move them.
  newer_.state.reserve(older_.state.size() + older_.state.size() / 8);
  newer_.calls.reserve(half_bytes_ + k_spare_bytes);
  core_.save(newer_.state);
}

void Recorder::begin(std::string& entry, calls::Call&& call) {
  std::string bytes;
  Writer writer(bytes);
  writer(static_cast<std::uint8_t>(call.index()));
  std::visit([&](const auto& each) { writer(each); }, call);
  Writer{entry}(bytes);
}

// An entry is the call's bytes, then the result's bytes, each with its length before it.
void Recorder::append(const std::string& entry) {
  newer_.calls += entry;
  ++newer_.count;
  if (newer_.calls.size() >= half_bytes_) {
    older_ = std::move(newer_);
    new_half();
  }
}

std::string Recorder::dump() const {
  const std::string log = raw();
  return log.empty() ? log : pack_log(log);
}

std::string Recorder::raw() const {
  if (!on_ && older_.count + newer_.count == 0) {
    return {};
  }
  // The state of the newer half only matters where the older one is gone: its calls continue the older ones.
  const Half& first = older_.count > 0 ? older_ : newer_;
  std::string raw;
  Writer writer(raw);
  writer(config_fields(), first.limits, first.state, older_.count + newer_.count);
  raw += older_.calls;
  raw += newer_.calls;
  return raw;
}

ReplayReport replay(std::span<const char> log, const std::function<void(const std::string&)>& print) {
  const std::string raw = unpack_log(log);
  Reader reader(raw);
  std::vector<std::string> fields;
  std::vector<double> values;
  std::string state;
  std::uint64_t count = 0;
  reader(fields, values, state, count);
  RouterCore core(calls::Configure{0.0, std::move(fields), std::move(values)}.config());
  core.load(state);

  ReplayReport report;
  for (; count > 0; --count) {
    std::string bytes;
    std::string recorded;
    reader(bytes, recorded);
    const calls::Call call = calls::decode(bytes);
    std::string result;
    std::visit(
        [&](const auto& each) {
          try {
            const auto outcome = each.run(core);
            calls::encode(result, outcome);
            if constexpr (std::is_same_v<std::remove_cvref_t<decltype(outcome)>, std::vector<Action>>) {
              report.placements += static_cast<std::uint64_t>(std::count_if(
                  outcome.begin(), outcome.end(), [](const Action& a) { return a.kind == Action::Kind::place; }));
            }
          } catch (const CoreError& error) {
            calls::encode_error(result, error.what());
          }
        },
        call);
    ++report.calls;
    std::string now;
    Reader{result}(now);
    if (print) {
      print(calls::describe(call) + calls::describe_result(now));
    }
    if (now != recorded) {
      report.equal = false;
      report.mismatch = "call " + std::to_string(report.calls) + ": " + calls::describe(call) +
                        "\n  recorded:" + calls::describe_result(recorded) +
                        "\n  replayed:" + calls::describe_result(now);
      return report;
    }
  }
  require(reader.at_end(), "log: bytes are left over");
  return report;
}

}  // namespace twinpool::admission
