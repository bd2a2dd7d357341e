# cmake -DINPUT=FILE -DOUTPUT=FILE.cc -DNAME=kName -P embed_text.cmake
# Writes a source file that defines the text of INPUT: extern const std::string_view lockstep::NAME.
file(READ "${INPUT}" text)
string(FIND "${text}" ")embedded\"" found)
if(NOT found EQUAL -1)
  message(FATAL_ERROR "${INPUT}: holds the end mark of the literal")
endif()
file(WRITE "${OUTPUT}" "#include <string_view>\n\nnamespace lockstep {\n
extern const std::string_view ${NAME};
const std::string_view ${NAME} = R\"embedded(${text})embedded\";\n
}  // namespace lockstep\n")
