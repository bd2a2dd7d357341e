# cmake --install: the binary with its script, and the static libraries as the CMake package `lockstep`, whose public
# interface is the headers listed here.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set_target_properties(lockstep PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)  # MPI may lie anywhere
install(TARGETS lockstep RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(PROGRAMS launch/run.sh DESTINATION ${CMAKE_INSTALL_BINDIR} RENAME lockstep-run)
install(PROGRAMS launch/scaling.sh DESTINATION ${CMAKE_INSTALL_BINDIR} RENAME lockstep-scaling)
install(FILES README.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# What a program links: the engine, tokenizers and chat templates.
add_library(lockstep_engine INTERFACE)
target_link_libraries(lockstep_engine INTERFACE lockstep_runtime lockstep_chat)

# lockstep_export(NAME [HEADER...]): the library lockstep_NAME as lockstep::NAME, with these public headers, which include no
# others of the project. Installed under include/lockstep/, so that #include "runtime/engine.h" works outside as it does here.
function(lockstep_export name)
  add_library(lockstep::${name} ALIAS lockstep_${name})  # the same name for users of add_subdirectory
  set_target_properties(lockstep_${name} PROPERTIES EXPORT_NAME ${name})
  if(ARGN)
    list(TRANSFORM ARGN PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE headers)
    target_sources(lockstep_${name} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${headers})
  endif()
  install(TARGETS lockstep_${name} EXPORT lockstep
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep)
endfunction()
lockstep_export(core runtime/core/buffer.h runtime/core/dtype.h runtime/core/json.h runtime/core/log.h
  runtime/core/phase_times.h runtime/core/range.h runtime/core/status.h)
lockstep_export(parallel parallel/communicator.h parallel/local_communicator.h parallel/mpi_communicator.h parallel/partition.h)
lockstep_export(cache)
lockstep_export(attention)
lockstep_export(checkpoint model/checkpoint/checkpoint.h model/checkpoint/gguf.h model/model_config.h)
lockstep_export(tokenizer model/tokenizer/gguf_vocab.h model/tokenizer/stream_decoder.h model/tokenizer/token_decoder.h
  model/tokenizer/tokenizer.h)
lockstep_export(chat model/chat/chat_config.h model/chat/chat_template.h)
lockstep_export(model)
lockstep_export(sampling)
lockstep_export(runtime runtime/engine.h runtime/request.h runtime/scheduler_stats.h runtime/text_output.h)
lockstep_export(engine)

set(_package ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
install(EXPORT lockstep FILE lockstepTargets.cmake NAMESPACE lockstep:: DESTINATION ${_package})
configure_package_config_file(launch/cmake/lockstepConfig.cmake.in ${PROJECT_BINARY_DIR}/lockstepConfig.cmake
  INSTALL_DESTINATION ${_package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/lockstepConfig.cmake ${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake
    launch/cmake/LockstepDependencies.cmake
  DESTINATION ${_package})
