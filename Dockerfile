# docker build -t east .
# docker run --gpus all -v "$PWD/results:/work/results" -v east-cache:/cache east dataset=cifar10 loss=f1
FROM python:3.11-slim

# The versions that the committed records were made with; PyTorch's wheels bring CUDA.
WORKDIR /opt/east
COPY requirements.lock ./
RUN pip install --no-cache-dir --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY east east
COPY conf conf
RUN pip install --no-cache-dir --no-deps .

ENV EAST_DATA_DIR=/cache
VOLUME /cache /work/results
WORKDIR /work
ENTRYPOINT ["east-run"]
