// SPDX-License-Identifier: Apache-2.0
//
// What torch asks a simulated device for: generators, streams, events, how many there are.
//
// Threads: any.   Memory: 5 KiB for each generator.
#pragma once

namespace sim {

int device_count();
void set_device_count(int devices);
/// Returns the current device, which is `device` from now on; −1: stays.
int exchanged_device(int device);
/// Tells torch of the device; once.
void register_hooks();

}  // namespace sim
