# lockstep_library(NAME SOURCES a.cc ... DEPS lib ...): one static library a folder.
# lockstep_test(NAME SOURCES a_test.cc ... DEPS lib ... [RANKS 1 2] [TIMEOUT s]): one GoogleTest binary a folder.
#   Without RANKS it is a CTest entry labelled cpu; with RANKS, one entry per rank count under mpirun, labelled mp.

if(LOCKSTEP_SANITIZE)
  add_compile_options(-fsanitize=${LOCKSTEP_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${LOCKSTEP_SANITIZE})
endif()

function(lockstep_compile_options target)
  # GCC 12 finds these two in its own std::string and std::optional: shown, but no errors.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${LOCKSTEP_WERROR}>>:-Werror;-Wno-error=restrict;-Wno-error=maybe-uninitialized>)
endfunction()

function(lockstep_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_include_directories(${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_link_libraries(${name} PUBLIC ${ARG_DEPS})
  lockstep_compile_options(${name})
endfunction()

function(lockstep_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT;SHARDS" "SOURCES;DEPS;RANKS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(${name} PRIVATE LOCKSTEP_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  lockstep_compile_options(${name})
  if(ARG_RANKS)
    target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gtest)
    foreach(ranks IN LISTS ARG_RANKS)
      add_test(NAME ${name}_np${ranks}
        COMMAND ${PROJECT_SOURCE_DIR}/tests/mpirun.sh ${ranks} $<TARGET_FILE:${name}>)
      set_tests_properties(${name}_np${ranks} PROPERTIES LABELS mp TIMEOUT ${ARG_TIMEOUT} PROCESSORS ${ranks})
    endforeach()
  else()
    target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gtest GTest::gtest_main)
    if(NOT ARG_SHARDS)
      add_test(NAME ${name} COMMAND ${name})
      set_tests_properties(${name} PROPERTIES LABELS cpu TIMEOUT ${ARG_TIMEOUT})
      return()
    endif()
    # The program's tests dealt to several runs, which ctest -j has side by side: name_1, name_2, ..
    math(EXPR last "${ARG_SHARDS} - 1")
    foreach(shard RANGE ${last})
      math(EXPR number "${shard} + 1")
      add_test(NAME ${name}_${number} COMMAND ${name})
      set_tests_properties(${name}_${number} PROPERTIES LABELS cpu TIMEOUT ${ARG_TIMEOUT}
        ENVIRONMENT "GTEST_TOTAL_SHARDS=${ARG_SHARDS};GTEST_SHARD_INDEX=${shard}")
    endforeach()
  endif()
endfunction()
