# Installs the client to a fresh prefix, builds the example there against nothing but the installed
# package, and runs it: cmake -D... -P installed_package_test.cmake
cmake_minimum_required(VERSION 3.25)
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output
                  WORKING_DIRECTORY ${WORK})
  message(STATUS "${ARGV}\n${output}")
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "exit code ${result}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
run(${CMAKE_COMMAND} --install ${BINARY_DIR} --component client --prefix ${WORK}/prefix)
file(COPY ${SOURCE_DIR}/client/example DESTINATION ${WORK})  # away from the headers of the source
run(${CMAKE_COMMAND} -S ${WORK}/example -B ${WORK}/build -G ${GENERATOR}
    -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_FLAGS=${FLAGS})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${FAKE_SERVER} ${WORK}/build/draw_digits {server})
if(NOT output MATCHES "12/12")
  message(FATAL_ERROR "the example told of no progress")
endif()
foreach(index 0 1 2)
  file(READ ${WORK}/digit-${index}.png magic LIMIT 8 HEX)
  if(NOT magic STREQUAL 89504e470d0a1a0a)
    message(FATAL_ERROR "digit-${index}.png is no PNG")
  endif()
endforeach()
run(${WORK}/prefix/bin/denoise --version)

file(STRINGS ${SOURCE_DIR}/client/example/draw_digits.cc lines)
list(LENGTH lines count)
if(count GREATER_EQUAL 40)
  message(FATAL_ERROR "the example has ${count} lines; it promises fewer than 40")
endif()
