// SPDX-License-Identifier: Apache-2.0
//
// What readers of rows take from Python: a feed of files' bytes (_row_files.py), and its signals.
//
// Threads: called without Python's lock, which they take.   Memory: what the feed gives at once.
#pragma once

#include "bindings.h"
#include "data/chat_lines.h"

namespace plimsoll::python {

/// Calls begin(file), read(size), done() and name(file, line), as ChatFeed has them. What they
/// raise goes through. None: no feed.
ChatFeed feed_of(const nb::object& feed);

/// Called while files are read: Ctrl-C comes through as KeyboardInterrupt.
void heed_signals();

}  // namespace plimsoll::python
