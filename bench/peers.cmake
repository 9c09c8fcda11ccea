# SPDX-License-Identifier: Apache-2.0
# plimsoll_bench_peers(TARGET): lets a library of engines use RocksDB (PLIMSOLL_HAVE_ROCKSDB) and LMDB
# (PLIMSOLL_HAVE_LMDB) where they are installed (librocksdb-dev, liblmdb-dev). Nothing else does.
find_path(PLIMSOLL_ROCKSDB_INCLUDE rocksdb/db.h)
find_library(PLIMSOLL_ROCKSDB rocksdb)
find_path(PLIMSOLL_LMDB_INCLUDE lmdb.h)
find_library(PLIMSOLL_LMDB lmdb)

function(plimsoll_bench_peers target)
  foreach(peer ROCKSDB LMDB)
    if(PLIMSOLL_${peer} AND PLIMSOLL_${peer}_INCLUDE)
      target_compile_definitions(${target} PRIVATE PLIMSOLL_HAVE_${peer})
      target_include_directories(${target} SYSTEM PRIVATE ${PLIMSOLL_${peer}_INCLUDE})
      target_link_libraries(${target} PRIVATE ${PLIMSOLL_${peer}})
    endif()
  endforeach()
endfunction()
