// SPDX-License-Identifier: Apache-2.0
//
// Frames are read as tracemalloc reads them, from the interpreter's own structures: the public
// functions make frame objects, which allocates and may start a garbage collection in the middle of
// an allocation. Nothing is kept but text, so no reference counts are touched.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000
#define Py_BUILD_CORE 1
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wshadow"
#include <internal/pycore_frame.h>
#pragma GCC diagnostic pop
#undef Py_BUILD_CORE
#elif PY_VERSION_HEX < 0x030B0000
#include <frameobject.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "places.h"

namespace plimsoll::python {
namespace {

constexpr int kFramesMost = 256;  // Deeper ones are not looked at.

struct Folder {
  std::array<char, Place::kFileMost> path{};
  std::size_t length{0};
};
std::array<Folder, kLibraryFoldersMost> library_folders{};
std::size_t library_folder_count = 0;

bool of_library(const char* file) noexcept {
  if (std::strncmp(file, "<frozen", 7) == 0) {
    return true;
  }
  return std::any_of(
      library_folders.begin(),
      library_folders.begin() + static_cast<std::ptrdiff_t>(library_folder_count),
      [&](const Folder& one) { return std::strncmp(file, one.path.data(), one.length) == 0; });
}

// UTF-8 of a code point, at most four bytes; returns how many. Surrogates stand for bytes of a path
// that are none.
std::size_t encode(Py_UCS4 point, char* to) noexcept {
  if (point >= 0xD800 && point < 0xE000) {
    point = '?';
  }
  const auto low = [](Py_UCS4 bits) { return static_cast<char>(0x80 | (bits & 0x3F)); };
  if (point < 0x80) {
    to[0] = static_cast<char>(point);
    return 1;
  }
  if (point < 0x800) {
    to[0] = static_cast<char>(0xC0 | (point >> 6));
    to[1] = low(point);
    return 2;
  }
  if (point < 0x10000) {
    to[0] = static_cast<char>(0xE0 | (point >> 12));
    to[1] = low(point >> 6);
    to[2] = low(point);
    return 3;
  }
  to[0] = static_cast<char>(0xF0 | (point >> 18));
  to[1] = low(point >> 12);
  to[2] = low(point >> 6);
  to[3] = low(point);
  return 4;
}

// The end of a path that is too long.
void write_file(PyObject* name, Place& place) noexcept {
  place.file[0] = '\0';
  if (name == nullptr || !PyUnicode_Check(name)) {
    return;
  }
  const auto kind = PyUnicode_KIND(name);
  const void* const data = PyUnicode_DATA(name);
  const Py_ssize_t length = PyUnicode_GET_LENGTH(name);
  constexpr auto kMost = static_cast<Py_ssize_t>(Place::kFileMost - 1);
  if (PyUnicode_IS_ASCII(name)) {
    const Py_ssize_t kept = std::min(length, kMost);
    std::memcpy(place.file.data(), static_cast<const char*>(data) + (length - kept),
                static_cast<std::size_t>(kept));
    place.file[static_cast<std::size_t>(kept)] = '\0';
    return;
  }
  std::size_t used = 0;
  for (Py_ssize_t at = std::max<Py_ssize_t>(0, length - kMost / 4); at < length; ++at) {
    used += encode(PyUnicode_READ(kind, data, at), place.file.data() + used);
  }
  place.file[used] = '\0';
}

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000

using Frame = _PyInterpreterFrame;

Frame* newest_frame(PyThreadState* thread) noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return thread->current_frame;
#else
  return thread->cframe == nullptr ? nullptr : thread->cframe->current_frame;
#endif
}
Frame* frame_before(Frame* frame) noexcept {
  return frame->previous;
}
bool whole(Frame* frame) noexcept {
  return !_PyFrame_IsIncomplete(frame);
}
PyCodeObject* code_of(Frame* frame) noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return _PyFrame_GetCode(frame);
#else
  return frame->f_code;
#endif
}
int line_of(Frame* frame) noexcept {
  return PyCode_Addr2Line(
      code_of(frame), _PyInterpreterFrame_LASTI(frame) * static_cast<int>(sizeof(_Py_CODEUNIT)));
}

#elif PY_VERSION_HEX < 0x030B0000

using Frame = PyFrameObject;

Frame* newest_frame(PyThreadState* thread) noexcept {
  return thread->frame;
}
Frame* frame_before(Frame* frame) noexcept {
  return frame->f_back;
}
bool whole(Frame* /*frame*/) noexcept {
  return true;
}
PyCodeObject* code_of(Frame* frame) noexcept {
  return frame->f_code;
}
int line_of(Frame* frame) noexcept {
  return PyFrame_GetLineNumber(frame);
}

#else

struct Frame {};
Frame* newest_frame(PyThreadState* /*thread*/) noexcept {
  return nullptr;
}
Frame* frame_before(Frame* /*frame*/) noexcept {
  return nullptr;
}
bool whole(Frame* /*frame*/) noexcept {
  return false;
}
PyCodeObject* code_of(Frame* /*frame*/) noexcept {
  return nullptr;
}
int line_of(Frame* /*frame*/) noexcept {
  return 0;
}

#endif

}  // namespace

void set_library_folders(const std::vector<std::string>& folders) {
  library_folder_count = 0;
  for (const std::string& folder : folders) {
    if (library_folder_count < kLibraryFoldersMost && folder.size() < Place::kFileMost &&
        !folder.empty()) {
      Folder& one = library_folders[library_folder_count++];
      std::memcpy(one.path.data(), folder.c_str(), folder.size() + 1);
      one.length = folder.size();
    }
  }
}

void python_place(Place& place) noexcept {
  PyThreadState* const thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) {
    return;
  }
  Place first{};
  int seen = 0;
  for (Frame* frame = newest_frame(thread); frame != nullptr && seen < kFramesMost;
       frame = frame_before(frame), ++seen) {
    if (!whole(frame)) {
      continue;
    }
    write_file(code_of(frame)->co_filename, place);
    if (!of_library(place.file.data())) {
      place.line = line_of(frame);
      return;
    }
    if (first.file[0] == '\0') {
      first.file = place.file;
      first.line = line_of(frame);
    }
  }
  place = first;
}

}  // namespace plimsoll::python
