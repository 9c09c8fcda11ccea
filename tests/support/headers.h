// SPDX-License-Identifier: Apache-2.0
//
// What most tests include and take two seconds to read; precompiled. No header of ours, so that an
// edit does not compile everything anew. A source still names all that it uses.
#pragma once
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>
