// SPDX-License-Identifier: Apache-2.0
//
// Source: System V ABI, "Dynamic Linking" (relocation sections, global offset table); the numbers
// of relocations are those of the x86-64 and AArch64 supplements.
#include "watch/malloc_hooks.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <malloc.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/mutex.h"
#include "watch/samples.h"

namespace plimsoll {
namespace {

#if defined(__aarch64__)
constexpr std::uint32_t kJumpSlot = 1026;
constexpr std::uint32_t kGlobalData = 1025;
#else
constexpr std::uint32_t kJumpSlot = 7;
constexpr std::uint32_t kGlobalData = 6;
#endif

// NOLINTBEGIN(cppcoreguidelines-no-malloc,cppcoreguidelines-owning-memory): they stand for these.
void* hooked_malloc(std::size_t bytes) {
  void* const pointer = ::malloc(bytes);
  Samples::allocated(pointer, bytes);
  return pointer;
}
void* hooked_calloc(std::size_t count, std::size_t bytes) {
  void* const pointer = ::calloc(count, bytes);
  Samples::allocated(pointer, count * bytes);
  return pointer;
}
void* hooked_realloc(void* before, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(before);
  void* const pointer = ::realloc(before, bytes);
  Samples::moved(address, pointer, bytes);
  return pointer;
}
int hooked_posix_memalign(void** pointer, std::size_t alignment, std::size_t bytes) {
  const int failed = ::posix_memalign(pointer, alignment, bytes);
  if (failed == 0) {
    Samples::allocated(*pointer, bytes);
  }
  return failed;
}
void* hooked_aligned_alloc(std::size_t alignment, std::size_t bytes) {
  void* const pointer = ::aligned_alloc(alignment, bytes);
  Samples::allocated(pointer, bytes);
  return pointer;
}
void* hooked_memalign(std::size_t alignment, std::size_t bytes) {
  void* const pointer = ::memalign(alignment, bytes);
  Samples::allocated(pointer, bytes);
  return pointer;
}
void hooked_free(void* pointer) {
  const int before = errno;  // A lock may change it; free() does not.
  Samples::freed(pointer);
  errno = before;
  ::free(pointer);
}
// NOLINTEND(cppcoreguidelines-no-malloc,cppcoreguidelines-owning-memory)
void* hooked_mmap(void* at, std::size_t bytes, int rights, int flags, int file, off_t offset) {
  void* const pointer = ::mmap(at, bytes, rights, flags, file, offset);
  if (pointer != MAP_FAILED) {
    Samples::allocated(pointer, bytes);
  }
  return pointer;
}
int hooked_munmap(void* pointer, std::size_t bytes) {
  Samples::freed(pointer);
  return ::munmap(pointer, bytes);
}

struct Hook {
  std::string_view name;
  void* hook;
  void* plain{nullptr};  // What the name stands for in this process.
};

template <class Function>
void* address_of(Function* function) {
  return reinterpret_cast<void*>(function);
}

struct HookTable {
  Mutex mutex;
  // Below: under mutex.
  std::array<Hook, 7> heap{{{"malloc", address_of(hooked_malloc)},
                            {"calloc", address_of(hooked_calloc)},
                            {"realloc", address_of(hooked_realloc)},
                            {"posix_memalign", address_of(hooked_posix_memalign)},
                            {"aligned_alloc", address_of(hooked_aligned_alloc)},
                            {"memalign", address_of(hooked_memalign)},
                            {"free", address_of(hooked_free)}}};
  std::array<Hook, 3> maps{{{"mmap", address_of(hooked_mmap)},
                            {"mmap64", address_of(hooked_mmap)},
                            {"munmap", address_of(hooked_munmap)}}};
  // How many libraries had been loaded when each was last installed; 0: it is not.
  unsigned long long heap_seen{0};
  unsigned long long maps_seen{0};
};

HookTable& hook_table() {
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory): hooks are called until the very end.
  static auto* const kImmortal = new HookTable;
  return *kImmortal;
}

// One pass over a library's tables: what to write for which name.
struct Pass {
  Hook* hooks;
  std::size_t count;
  bool to_hooks;
  int written{0};

  [[nodiscard]] const Hook* named(const char* name) const noexcept {
    for (std::size_t at = 0; at < count; ++at) {
      if (name[0] == hooks[at].name[0] && hooks[at].name == name) {
        return &hooks[at];
      }
    }
    return nullptr;
  }
};

struct Library {
  ElfW(Addr) base{0};
  const char* names{nullptr};
  const ElfW(Sym) * symbols{nullptr};
  ElfW(Addr) sealed_from{0};  // Read-only after loading.
  ElfW(Addr) sealed_to{0};
};

void write_entry(const Library& library, void** entry, void* value) {
  static const auto kPage = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(entry);
  auto* const start = reinterpret_cast<void*>(address & ~(kPage - 1));
  const bool sealed = address >= library.sealed_from && address < library.sealed_to;
  if (sealed && ::mprotect(start, kPage, PROT_READ | PROT_WRITE) != 0) {
    return;
  }
  __atomic_store_n(entry, value, __ATOMIC_RELEASE);
  if (sealed) {
    ::mprotect(start, kPage, PROT_READ);
  }
}

void redirect(const Library& library, const ElfW(Rela) * entries, std::size_t count, Pass& pass) {
  for (std::size_t at = 0; at < count; ++at) {
    const auto type = static_cast<std::uint32_t>(ELF64_R_TYPE(entries[at].r_info));
    if (type != kJumpSlot && type != kGlobalData) {
      continue;
    }
    const ElfW(Sym)& symbol = library.symbols[ELF64_R_SYM(entries[at].r_info)];
    if (symbol.st_shndx != SHN_UNDEF) {
      continue;  // A library with an allocator of its own.
    }
    const char* const name = library.names + symbol.st_name;
    if (const Hook* const hook = pass.named(name); hook != nullptr && hook->plain != nullptr) {
      auto** const entry = reinterpret_cast<void**>(library.base + entries[at].r_offset);
      void* const value = pass.to_hooks ? hook->hook : hook->plain;
      void* const there = __atomic_load_n(entry, __ATOMIC_ACQUIRE);
      if (pass.to_hooks ? there != value : there == hook->hook) {
        write_entry(library, entry, value);
        ++pass.written;
      }
    }
  }
}

// The C library's own calls, the linker's and ours stay as they are.
bool left_alone(const dl_phdr_info& info) {
  const auto holds = [&](const void* address) {
    const auto at = reinterpret_cast<ElfW(Addr)>(address);
    for (int k = 0; k < info.dlpi_phnum; ++k) {
      const ElfW(Phdr)& part = info.dlpi_phdr[k];
      const ElfW(Addr) start = info.dlpi_addr + part.p_vaddr;
      if (part.p_type == PT_LOAD && at >= start && at < start + part.p_memsz) {
        return true;
      }
    }
    return false;
  };
  const std::string_view path = info.dlpi_name == nullptr ? "" : info.dlpi_name;
  return holds(address_of(hooked_malloc)) || holds(::dlsym(RTLD_DEFAULT, "gnu_get_libc_version")) ||
         path.find("/ld-linux") != std::string_view::npos ||
         path.find("linux-vdso") != std::string_view::npos;
}

int each_library(dl_phdr_info* info, std::size_t /*size*/, void* data) {
  if (left_alone(*info)) {
    return 0;
  }
  Library library{.base = info->dlpi_addr};
  const ElfW(Dyn)* dynamic = nullptr;
  for (int k = 0; k < info->dlpi_phnum; ++k) {
    const ElfW(Phdr)& part = info->dlpi_phdr[k];
    if (part.p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + part.p_vaddr);
    } else if (part.p_type == PT_GNU_RELRO) {
      library.sealed_from = info->dlpi_addr + part.p_vaddr;
      library.sealed_to = library.sealed_from + part.p_memsz;
    }
  }
  const ElfW(Rela)* calls = nullptr;
  const ElfW(Rela)* others = nullptr;
  std::size_t calls_bytes = 0;
  std::size_t others_bytes = 0;
  std::size_t relative = 0;  // So many of the others come first and have no name.
  for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; ++dynamic) {
    const auto value = dynamic->d_un.d_val;
    switch (dynamic->d_tag) {
      case DT_STRTAB:
        library.names = reinterpret_cast<const char*>(value);
        break;
      case DT_SYMTAB:
        library.symbols = reinterpret_cast<const ElfW(Sym)*>(value);
        break;
      case DT_JMPREL:
        calls = reinterpret_cast<const ElfW(Rela)*>(value);
        break;
      case DT_PLTRELSZ:
        calls_bytes = value;
        break;
      case DT_RELA:
        others = reinterpret_cast<const ElfW(Rela)*>(value);
        break;
      case DT_RELASZ:
        others_bytes = value;
        break;
      case DT_RELACOUNT:
        relative = value;
        break;
      default:
        break;
    }
  }
  if (library.names == nullptr || library.symbols == nullptr) {
    return 0;
  }
  auto& pass = *static_cast<Pass*>(data);
  if (calls != nullptr) {
    redirect(library, calls, calls_bytes / sizeof(ElfW(Rela)), pass);
  }
  if (const std::size_t count = others_bytes / sizeof(ElfW(Rela));
      others != nullptr && count > relative) {
    redirect(library, others + relative, count - relative, pass);
  }
  return 0;
}

template <std::size_t kCount>
int run_pass(std::array<Hook, kCount>& hooks, bool to_hooks) {
  for (Hook& hook : hooks) {
    if (hook.plain == nullptr) {
      hook.plain = ::dlsym(RTLD_DEFAULT, hook.name.data());
    }
  }
  Pass pass{.hooks = hooks.data(), .count = kCount, .to_hooks = to_hooks};
  ::dl_iterate_phdr(each_library, &pass);
  return pass.written;
}

// In the life of the process.
unsigned long long libraries_loaded() {
  unsigned long long loaded = 0;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t /*size*/, void* count) {
        *static_cast<unsigned long long*>(count) = info->dlpi_adds;
        return 1;
      },
      &loaded);
  return loaded;
}

}  // namespace

int MallocHooks::install(Of of) {
  HookTable& table = hook_table();
  const MutexLock lock(table.mutex);
  unsigned long long& seen = of == Of::kHeap ? table.heap_seen : table.maps_seen;
  const unsigned long long loaded = libraries_loaded();
  if (std::exchange(seen, loaded) == loaded) {
    return 0;
  }
  return of == Of::kHeap ? run_pass(table.heap, true) : run_pass(table.maps, true);
}

void MallocHooks::remove() {
  HookTable& table = hook_table();
  const MutexLock lock(table.mutex);
  if (std::exchange(table.heap_seen, 0) != 0) {
    run_pass(table.heap, false);
  }
  if (std::exchange(table.maps_seen, 0) != 0) {
    run_pass(table.maps, false);
  }
}

}  // namespace plimsoll
