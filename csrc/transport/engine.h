// SPDX-License-Identifier: Apache-2.0
// gRPC's completion queue, the thread that waits on it, and the queue of events towards the one thread that serves
// calls.
#pragma once

#include <grpc/grpc.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

namespace twinpool::transport {

class Call;

/// A metadata entry as it goes over the wire; a key that ends in "-bin" has any bytes as its value.
using Header = std::pair<std::string, std::string>;

/// How a call ended.
struct Status {
  int code = 0;
  std::string details;
  std::vector<Header> trailing;
};

/// What has happened to a call, or (without one) to a server.
struct Event {
  enum class Kind { opened, message, closed, writable, stopped };
  Kind kind;
  std::shared_ptr<Call> call;
  grpc_byte_buffer* message = nullptr;  // owned; null: the other side sends no more
  Status status;                        // of `closed`
  uint64_t server = 0;                  // of `stopped`

  static Event of(Kind kind, std::shared_ptr<Call> call, grpc_byte_buffer* message = nullptr) {
    return {.kind = kind, .call = std::move(call), .message = message, .status = {}, .server = 0};
  }
};

/// An operation under way. Lives until it is complete.
class Tag {
 public:
  virtual ~Tag() = default;
  /// On the engine's thread, once for each start. `ok`: whether the operation was carried out.
  virtual void complete(bool ok) = 0;
};

/// One a process. `take` is for the thread that serves calls; everything else may be called on any.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine();
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Starts the thread, which keeps the engine alive until `close`.
  void start();
  grpc_completion_queue* queue() const { return queue_; }
  /// Readable while events wait; owned by the engine.
  int wakeup_fd() const { return wakeup_; }
  bool closing() const { return closing_.load(std::memory_order_acquire); }
  uint64_t next_id() { return ++last_id_; }

  /// An operation is about to start, or could not be started after all.
  void begin() { running_.fetch_add(1, std::memory_order_relaxed); }
  void undo() { end(); }
  void post(Event event);
  /// Everything that has happened since the last call.
  std::vector<Event> take();

  void add(Call* call);
  void remove(Call* call);
  /// Cancels what runs and returns when nothing of it is left. Servers have been stopped before. Not on the engine's
  /// thread.
  void close();

 private:
  void loop();
  void end();

  grpc_completion_queue* queue_ = nullptr;
  int wakeup_ = -1;
  std::atomic<uint64_t> last_id_{0};
  std::atomic<int64_t> running_{0};
  std::atomic<bool> closing_{false};
  std::mutex mutex_;  // guards what follows
  std::condition_variable idle_;
  std::vector<Event> events_;
  bool signalled_ = false;
  std::unordered_set<Call*> calls_;
  std::thread thread_;
};

}  // namespace twinpool::transport
