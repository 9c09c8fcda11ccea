// SPDX-License-Identifier: Apache-2.0
//
// What readers of rows take from Python: a feed of lines in place of files, and its signals.
//
// Threads: called without Python's lock, which they take.   Memory: what the feed gives at once.
#pragma once

#include "bindings.h"
#include "data/chat_lines.h"

namespace plimsoll::python {

/// Calls read(size), which gives at most so many bytes, as a file does. What it raises goes
/// through. None: no feed.
ChatFeed feed_of(const nb::object& read);

/// Called while files are read: Ctrl-C comes through as KeyboardInterrupt.
void heed_signals();

}  // namespace plimsoll::python
