// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target over a stored corpus without a fuzzer: a regression test for every compiler.
// Usage: TARGET FILE; each line of the file is an input in hexadecimal.
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CORPUS\n", argv[0]);
    return 2;
  }
  std::ifstream corpus(argv[1]);
  std::size_t inputs = 0;
  for (std::string line; std::getline(corpus, line); ++inputs) {
    std::vector<std::uint8_t> bytes;
    for (std::size_t i = 0; i + 1 < line.size(); i += 2) {
      bytes.push_back(static_cast<std::uint8_t>(std::stoi(line.substr(i, 2), nullptr, 16)));
    }
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%zu inputs\n", inputs);
  return inputs == 0 ? 1 : 0;  // a corpus that is not there tests nothing
}
