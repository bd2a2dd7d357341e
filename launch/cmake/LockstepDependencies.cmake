# Finds what Lockstep is built with, and what a program that links it needs: the installed package includes this file, too.
# Debian's packages are enough (launch/install_deps.sh names them). Static archives are preferred where a package has them,
# so that the binary runs on a machine that has Open MPI and nothing else.

# Without a library the build ends here; inside find_package(lockstep) the package counts as not found, and this file is left.
include(CMakeFindDependencyMacro)
macro(lockstep_find)
  if(CMAKE_FIND_PACKAGE_NAME)
    find_dependency(${ARGN})
  else()
    find_package(${ARGN} REQUIRED)
  endif()
endmacro()

lockstep_find(Threads)
lockstep_find(absl)
lockstep_find(nlohmann_json)

# The C interface alone. A project without the language C finds it through MPI's C++ compiler.
set(MPI_CXX_SKIP_MPICXX ON)  # the C++ bindings of MPI-2 are not used; without this libmpi_cxx is linked
if(CMAKE_C_COMPILER_LOADED)
  set(_lockstep_mpi C)
else()
  set(_lockstep_mpi CXX)
endif()
lockstep_find(MPI COMPONENTS ${_lockstep_mpi})
if(NOT TARGET lockstep_dep::mpi)
  add_library(lockstep_dep::mpi INTERFACE IMPORTED)
  set_target_properties(lockstep_dep::mpi PROPERTIES INTERFACE_LINK_LIBRARIES MPI::MPI_${_lockstep_mpi})
endif()

# Debian's Abseil targets name the shared libraries, though the archives lie beside them.
get_property(_lockstep_targets DIRECTORY PROPERTY IMPORTED_TARGETS)
foreach(_target IN LISTS _lockstep_targets)
  if(_target MATCHES "^absl::")
    get_target_property(_location ${_target} IMPORTED_LOCATION_NONE)
    if(_location MATCHES "\\.so[.0-9]*$")
      string(REGEX REPLACE "\\.so[.0-9]*$" ".a" _archive ${_location})
      if(EXISTS ${_archive})
        set_target_properties(${_target} PROPERTIES IMPORTED_LOCATION_NONE ${_archive})
      endif()
    endif()
  endif()
endforeach()

# lockstep_import(NAME HEADER ARCHIVE [DEFINITION...]): lockstep_dep::NAME, for a library that has no CMake package of its own.
macro(lockstep_import name header archive)
  find_path(LOCKSTEP_${name}_INCLUDE_DIR ${header} HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(LOCKSTEP_${name}_LIBRARY NAMES ${archive} HINTS ${CUDAToolkit_LIBRARY_DIR})
  mark_as_advanced(LOCKSTEP_${name}_INCLUDE_DIR LOCKSTEP_${name}_LIBRARY)
  if(NOT LOCKSTEP_${name}_INCLUDE_DIR OR NOT LOCKSTEP_${name}_LIBRARY)
    set(_missing "${header} and ${archive} were not found: install the development package of ${name}")
    if(NOT CMAKE_FIND_PACKAGE_NAME)
      message(FATAL_ERROR "${_missing}")
    endif()
    set(${CMAKE_FIND_PACKAGE_NAME}_FOUND FALSE)
    set(${CMAKE_FIND_PACKAGE_NAME}_NOT_FOUND_MESSAGE "${_missing}")
    return()
  endif()
  if(NOT TARGET lockstep_dep::${name})
    add_library(lockstep_dep::${name} UNKNOWN IMPORTED)
    set_target_properties(lockstep_dep::${name} PROPERTIES IMPORTED_LOCATION ${LOCKSTEP_${name}_LIBRARY}
      INTERFACE_INCLUDE_DIRECTORIES ${LOCKSTEP_${name}_INCLUDE_DIR} INTERFACE_COMPILE_DEFINITIONS "${ARGN}")
  endif()
endmacro()
if(LOCKSTEP_HAS_CUDA)  # set by LockstepCuda.cmake or by the package
  lockstep_find(CUDAToolkit)
  lockstep_import(nccl nccl.h nccl)
endif()
lockstep_import(pcre2 pcre2.h libpcre2-8.a)
lockstep_import(utf8proc utf8proc.h libutf8proc.a UTF8PROC_STATIC)

# Of no interest to a program that links Lockstep: spdlog and fmt are compiled into one source file (runtime/core/log.cc), what is
# used of Boost, headers alone, into two more (launch/http/http_request_parser.cc, http_response_parser.cc).
if(NOT CMAKE_FIND_PACKAGE_NAME)
  lockstep_find(spdlog)
  # No shared libfmt.
  set_target_properties(spdlog::spdlog_header_only PROPERTIES
    INTERFACE_LINK_LIBRARIES "fmt::fmt-header-only;Threads::Threads")
  find_path(LOCKSTEP_BEAST_INCLUDE_DIR boost/beast/http/basic_parser.hpp)
  mark_as_advanced(LOCKSTEP_BEAST_INCLUDE_DIR)
  if(NOT LOCKSTEP_BEAST_INCLUDE_DIR)
    message(FATAL_ERROR "boost/beast/http/basic_parser.hpp was not found: install the development package of Boost")
  endif()
endif()
