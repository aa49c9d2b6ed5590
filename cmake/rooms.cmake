# SPDX-License-Identifier: Apache-2.0
# A room is one static library, denoised::<name>, whose headers are included from the root of the
# repository ("engine/core/tensor.h"). PUBLIC rooms appear in its headers, PRIVATE ones only in its
# sources. tests/include_directions_test.py holds the same directions against the includes.
add_library(denoised_build_flags INTERFACE)
target_include_directories(denoised_build_flags INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(denoised_build_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers>
  # GCC 12 reports overlaps that cannot be in std::string at -O3 (its bug 105651), and takes a room's files
  # for headers where they are compiled as one.
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict -Wno-subobject-linkage>
  # Clang builds for the sanitizers, and instrumented loops do not vectorise. It checks the
  # annotations of core/mutex.h.
  $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-pass-failed -Wthread-safety -Werror=thread-safety>)
if(DENOISED_SANITIZE)
  target_compile_definitions(denoised_build_flags INTERFACE DENOISED_SANITIZED)
  target_compile_options(denoised_build_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${DENOISED_SANITIZE} -fno-omit-frame-pointer>)
  target_link_options(denoised_build_flags INTERFACE -fsanitize=${DENOISED_SANITIZE})
  if(DENOISED_SANITIZE MATCHES "thread")
    # protobuf's map fields have one more member under this macro, which some compilers define, but the
    # distribution's library was built without it.
    target_compile_options(denoised_build_flags INTERFACE -U__SANITIZE_THREAD__)
    target_compile_definitions(denoised_build_flags INTERFACE DENOISED_THREAD_SANITIZER)
  endif()
endif()

function(denoised_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(denoised_${name} STATIC ${ROOM_SOURCES})
  add_library(denoised::${name} ALIAS denoised_${name})
  target_link_libraries(denoised_${name} PUBLIC denoised_build_flags ${ROOM_PUBLIC}
                                         PRIVATE ${ROOM_PRIVATE})
  if(DENOISED_FUZZ)  # as tests/fuzz/ needs it
    target_compile_options(denoised_${name} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
endfunction()

# One GoogleTest binary, one ctest entry.
function(denoised_test name)
  cmake_parse_arguments(TEST "" "" "SOURCES;LINK" ${ARGN})
  add_executable(${name} ${TEST_SOURCES})
  target_link_libraries(${name} PRIVATE denoised_build_flags ${TEST_LINK} GTest::gmock_main)
  target_compile_definitions(${name} PRIVATE DENOISED_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  # Half the time to compile a test is optimisation. -O1 still inlines what the rooms' headers define, so no
  # room gets slower; -O0 would make loops of tests take longer than it saves.
  target_compile_options(${name} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<NOT:$<CONFIG:Debug>>>:-O1>)
  add_test(NAME ${name} COMMAND ${name})
endfunction()
