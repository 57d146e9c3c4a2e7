// SPDX-License-Identifier: Apache-2.0
// One call, seen from either end: messages go out in order, come in as they are taken, and an end.
#pragma once

#include <grpc/grpc.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/engine.h"

namespace twinpool::transport {

/// Reading pauses while so much of a call waits to be taken.
inline constexpr size_t kUntakenMessages = 64;
inline constexpr size_t kUntakenBytes = 1 << 20;

/// Thread-safe. Each operation under way keeps it alive.
class Call : public std::enable_shared_from_this<Call> {
 public:
  virtual ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  uint64_t id() const { return id_; }
  /// Queues messages, whose buffers it takes, and for a server's call how it ends; nothing is taken after that.
  void send(std::vector<grpc_byte_buffer*> messages, std::optional<Status> end);
  /// Bytes that gRPC has not accepted yet: flow control holds them, or the connection.
  size_t waiting_bytes() const { return waiting_bytes_.load(std::memory_order_relaxed); }
  /// Whether at most `bytes` wait. If not, a `writable` event follows as soon as that is so.
  bool writable(size_t bytes);
  void cancel(grpc_status_code code, const char* why);
  /// A message was taken from the engine: reading goes on.
  void taken(size_t bytes);
  std::string peer() const;
  /// Names and values that the handshake has shown of the other side.
  std::vector<Header> identity() const;

 protected:
  explicit Call(std::shared_ptr<Engine> engine);

  /// A tag of this call. `done` runs on the engine's thread.
  struct Operation : Tag {
    Operation(Call* call, void (Call::*run)(bool))
        : owner(call),
          done(run) {}
    void complete(bool ok) override;
    Call* owner;
    void (Call::*done)(bool);
    std::shared_ptr<Call> alive;
  };

  /// Starts operations; false if gRPC takes none any more. With the mutex held.
  bool start(Operation& operation, const grpc_op* ops, size_t count);
  void read();  // with the mutex held
  void pump();  // with the mutex held
  void on_read(bool ok);
  void on_write(bool ok);
  /// A message, or null, has come. With the mutex held.
  virtual void received(grpc_byte_buffer* message);
  /// What belongs behind the last message. With the mutex held.
  virtual bool add_end(grpc_op& op) = 0;
  virtual bool awaits_initial_metadata() const = 0;

  std::shared_ptr<Engine> engine_;
  const uint64_t id_;
  grpc_call* call_ = nullptr;
  std::mutex mutex_;  // guards what follows
  std::optional<Status> end_;
  bool ended_ = false;     // nothing can be sent any more
  bool read_all_ = false;  // nothing more comes, or nothing more is wanted

 private:
  Operation read_{this, &Call::on_read};
  Operation write_{this, &Call::on_write};
  std::deque<std::pair<grpc_byte_buffer*, size_t>> outgoing_;
  grpc_byte_buffer* incoming_ = nullptr;
  grpc_metadata_array initial_;
  std::atomic<size_t> waiting_bytes_{0};
  size_t untaken_messages_ = 0;
  size_t untaken_bytes_ = 0;
  std::optional<size_t> wanted_;
  bool reading_ = false;

  bool writing_ = false;
  bool carrying_ = false;  // what is being written has the first message
  bool greeted_ = false;   // the initial metadata is on its way
  bool heard_ = false;     // the other side's is asked for
};

/// Copies a slice.
std::string text_of(const grpc_slice& slice);
/// Copies metadata.
std::vector<Header> headers_of(const grpc_metadata_array& array);

}  // namespace twinpool::transport
