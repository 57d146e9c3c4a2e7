// SPDX-License-Identifier: Apache-2.0
#include "transport/engine.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "transport/call.h"

namespace twinpool::transport {

Engine::Engine() {
  wakeup_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wakeup_ < 0) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  grpc_init();
  queue_ = grpc_completion_queue_create_for_next(nullptr);
}

void Engine::start() {
  thread_ = std::thread([self = shared_from_this()] { self->loop(); });
}

Engine::~Engine() {
  for (Event& event : events_) {
    if (event.message != nullptr) {
      grpc_byte_buffer_destroy(event.message);
    }
  }
  events_.clear();
  grpc_completion_queue_destroy(queue_);
  grpc_shutdown();
  ::close(wakeup_);
}

void Engine::loop() {
  while (true) {
    const grpc_event event = grpc_completion_queue_next(queue_, gpr_inf_future(GPR_CLOCK_REALTIME), nullptr);
    if (event.type == GRPC_QUEUE_SHUTDOWN) {
      return;
    }
    if (event.type == GRPC_OP_COMPLETE) {
      static_cast<Tag*>(event.tag)->complete(event.success != 0);
      end();
    }
  }
}

void Engine::end() {
  if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1 && closing()) {
    const std::lock_guard lock(mutex_);
    idle_.notify_all();
  }
}

void Engine::post(Event event) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    first = !signalled_;
    signalled_ = true;
  }
  if (first) {
    const uint64_t one = 1;
    // The counter cannot overflow: it is written once for each time that it is read.
    [[maybe_unused]] const ssize_t written = write(wakeup_, &one, sizeof one);
  }
}

std::vector<Event> Engine::take() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t had = read(wakeup_, &count, sizeof count);
  std::vector<Event> taken;
  const std::lock_guard lock(mutex_);
  signalled_ = false;
  taken.swap(events_);
  return taken;
}

void Engine::add(Call* call) {
  const std::lock_guard lock(mutex_);
  calls_.insert(call);
}

void Engine::remove(Call* call) {
  const std::lock_guard lock(mutex_);
  calls_.erase(call);
}

void Engine::close() {
  if (!thread_.joinable()) {
    return;
  }
  closing_.store(true, std::memory_order_release);
  std::vector<std::shared_ptr<Call>> open;
  {
    const std::lock_guard lock(mutex_);
    for (Call* call : calls_) {
      if (auto alive = call->weak_from_this().lock()) {
        open.push_back(std::move(alive));
      }
    }
  }
  for (const auto& call : open) {
    call->cancel(GRPC_STATUS_CANCELLED, "the transport was closed");
  }
  open.clear();
  {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return running_.load(std::memory_order_acquire) == 0; });
  }
  grpc_completion_queue_shutdown(queue_);
  thread_.join();
}

}  // namespace twinpool::transport
